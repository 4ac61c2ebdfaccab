"""Our checkpoints, made into DeepSpeed's universal ones.

::

    <dir>/<tag>/zero/<parameter>/fp32.pt                        master weight, and by its name each
                                 exp_avg.pt ...                 optimizer state, of (shape)
                                 step.pt                        optimizer steps
                zero/optimizer_state.pt                         options of the parameter groups
                mp_rank_00_model_states.pt                      counters, schedule, client state;
                                                                "module": all weights and buffers
                zero_pp_rank_0_mp_rank_00_model_states.pt       the same without trained weights
    <dir>/latest, <dir>/latest_universal                        the tag

DeepSpeed reads one at stages 1 to 3 and any number of ranks, when its file says ``"checkpoint":
{"load_universal": true}``, and then takes no buffers and frozen weights from it; with
``load_module_only`` it reads all weights at stages 0 to 2, without that key. The files hold
tensors, numbers and strings, and no class of DeepSpeed's: a dynamic loss scale begins anew.
"""

import shutil
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.deepspeed.stages import OPTIONS
from zerotrial.engine.checkpoint.files import (
    LATEST,
    CheckpointError,
    Manifest,
    create_temporary,
    hash_file,
    publish_directory,
    replace_text,
)
from zerotrial.engine.checkpoint.load import find
from zerotrial.engine.checkpoint.shards import ShardReader, read_tensors
from zerotrial.engine.checkpoint.state import CLIENT_STATE, ENGINE_STATE, from_file

__all__ = ["OWN_KEYS", "WRITTEN_FOR", "export_deepspeed"]

WRITTEN_FOR = "0.19.8"
"""DeepSpeed's version whose files these are."""

OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("ds_config", "ds_version", "checkpoint_parallel_dimensions", "num_experts"),
        *("sparse_tensor_module_names", "ds_autoep_layers", "universal_checkpoint_info"),
    }
)
"""Of a model file; everything else is the user's client state."""


def export_deepspeed(
    source: str | PathLike[str], destination: str | PathLike[str], tag: str | None = None
) -> str:
    """Make a universal checkpoint of DeepSpeed's from one of ours.

    Args:
        source: As it was passed to ``save_checkpoint``; saved at any stage and number of ranks.
        destination: Holds the new checkpoint, under the same tag.
        tag: None means the one that ``latest`` names.

    Returns:
        Directory of the new checkpoint.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointError: If a file is damaged or missing, or holds what DeepSpeed has no place for;
            if the new one cannot be written, of which nothing is left then.
    """
    path = find(Path(source), tag)
    manifest = Manifest.read(path)
    for name, record in manifest.files.items():
        if hash_file(path / name) != record:
            raise CheckpointError(f"{path / name}: damaged (its hash is not the manifest's)")
    engine_state, client = from_file(path / ENGINE_STATE), from_file(path / CLIENT_STATE)
    problems = list(_problems(manifest, engine_state, client))
    if problems:
        msg = f"{path}: cannot be exported to DeepSpeed:\n  "
        raise CheckpointError(msg + "\n  ".join(problems))
    final = Path(destination) / path.name
    temporary = create_temporary(final.parent, final.name)
    try:
        _write(path, manifest, engine_state, client, temporary)
        publish_directory(temporary, final)
    except (OSError, RuntimeError) as error:  # the latter is what torch.save says of a full disk
        msg = f"{final}: could not be written: {error}"
        raise CheckpointError(msg) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # moved away unless something failed
    for latest in (LATEST, f"{LATEST}_universal"):
        replace_text(final.parent / latest, f"{final.name}\n")
    return str(final)


def _write(
    path: Path,
    manifest: Manifest,
    engine_state: Mapping[str, Any],
    client: dict[str, Any],
    out: Path,
) -> None:
    """Fill a folder with the files that DeepSpeed reads."""
    whole = read_tensors(path / name for name in manifest.files if name.startswith("module-"))
    shards = [path / name for name in manifest.files if name.startswith("rank-")]
    weights: dict[str, Tensor] = {}
    with ShardReader(name for name in shards if name.suffix == ".safetensors") as reader:
        kinds = sorted(reader.all_kinds - {"master"})
        for name, shape in manifest.shapes.items():
            weights[name] = reader.whole(name, "master", shape)
            states = {kind: reader.whole(name, kind, shape) for kind in kinds}
            _write_parameter(out / "zero" / name, weights[name], states, _steps(engine_state))
    torch.save(_optimizer(engine_state), out / "zero" / "optimizer_state.pt")
    model = _model(manifest, engine_state) | client
    torch.save(model | {"module": whole | weights}, out / "mp_rank_00_model_states.pt")
    torch.save(model | {"module": whole}, out / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _problems(
    manifest: Manifest, engine_state: Mapping[str, Any], client: Mapping[str, Any]
) -> Iterator[str]:
    if manifest.layout.get("pipe", 1) > 1:
        yield f"pipeline stages: must be 1, got {manifest.layout['pipe']}; DeepSpeed names layers"
    if engine_state.get("window") is not None:
        yield (
            "gradients of an unfinished accumulation window: DeepSpeed keeps none; save after a "
            "step() that updates"
        )
    if any(name.startswith("states-") for name in manifest.files):
        kind = engine_state["optimizer"]["type"]
        yield f"optimizer states: must go by element, got those of {kind}"
    if manifest.excluded:
        yield f"frozen parameters: must be there, got none of {', '.join(manifest.excluded)}"
    if len(set(_all_steps(engine_state))) > 1:
        yield "optimizer steps: must be the same for all parameter groups, which they are not"
    if taken := sorted(OWN_KEYS & client.keys()):
        yield f"client_state: DeepSpeed needs these keys itself: {', '.join(taken)}"


def _write_parameter(
    folder: Path, weight: Tensor, states: Mapping[str, Tensor], steps: float
) -> None:
    folder.mkdir(parents=True)
    for kind, tensor in {"fp32": weight, **states}.items():
        torch.save({"param": tensor}, folder / f"{kind}.pt")
    torch.save(torch.tensor(steps), folder / "step.pt")


def _all_steps(engine_state: Mapping[str, Any]) -> list[float]:
    scalars = engine_state["optimizer"]["scalars"]
    return [float(value) for name, value in scalars.items() if name.endswith(".step")]


def _steps(engine_state: Mapping[str, Any]) -> float:
    counters = engine_state["parts"]["counters"]["state"]
    updates = counters["global_steps"] - counters["skipped_steps"]
    return next(iter(_all_steps(engine_state)), float(updates))


def _optimizer(engine_state: Mapping[str, Any]) -> dict[str, Any]:
    """Stages 1 and 2 look for the groups at the top, stage 3 one level down."""
    saved = engine_state["optimizer"]["groups"]
    groups = [{k: v for k, v in group.items() if k in OPTIONS} for group in saved]
    state = {0: {"step": torch.tensor(_steps(engine_state))}}
    return {
        "ds_version": WRITTEN_FOR,
        "param_groups": [{**group, "params": []} for group in groups],
        "optimizer_state_dict": {
            "state": state,
            "param_groups": [{**group, "params": []} for group in groups],
        },
    }


def _model(manifest: Manifest, engine_state: Mapping[str, Any]) -> dict[str, Any]:
    counters = engine_state["parts"]["counters"]["state"]
    schedule = engine_state["parts"].get("lr_scheduler")
    return {
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "skipped_steps": counters["skipped_steps"],
        "lr_scheduler": schedule["state"] if schedule is not None else None,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": WRITTEN_FOR,
        "optimizer": None,
        "param_shapes": [{name: torch.Size(s) for name, s in manifest.shapes.items()}],
    }
