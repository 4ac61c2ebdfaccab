"""Conversion of DeepSpeed's checkpoints, stages 0 to 3, to Zerolab's format.

The result loads at any stage and number of ranks, like every checkpoint::

    import_deepspeed("ds_run", "run")  # or: python -m zerotrial.engine.checkpoint.deepspeed A B
    engine.load_checkpoint("run")

DeepSpeed does not save random generators, nor the position in an accumulation window.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from zerolab.errors import ZerolabError
from zerotrial.engine.checkpoint.files import (
    CheckpointError,
    CheckpointRanks,
    Manifest,
    check_tag,
    create_temporary,
)
from zerotrial.engine.checkpoint.save import SaveJob, save_now
from zerotrial.engine.checkpoint.state import CLIENT_STATE, ENGINE_STATE, to_bytes
from zerotrial.extensions.deepspeed_api.checkpoint_import.files import (
    Sources,
    find_sources,
    read_pickle,
)
from zerotrial.extensions.deepspeed_api.checkpoint_import.stages import (
    ImportedState,
    read_stage0,
    read_stage3,
    read_stages_1_and_2,
)

__all__ = ["import_deepspeed"]

_MODEL_FILE_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("ds_config", "ds_version", "checkpoint_parallel_dimensions", "num_experts"),
        *("sparse_tensor_module_names", "ds_autoep_layers", "universal_checkpoint_info"),
    }
)
"""Keys that DeepSpeed writes into a model file; all other keys are the user's client state."""

_NO_EXPORT = (
    "--export: was removed, checkpoints are not converted to DeepSpeed's format; write the weights "
    "with engine.export(PATH), or read them with "
    "zerotrial.extensions.full_weights.export.read_weights(DIR), and load them into the model "
    "before deepspeed.initialize()"
)


def import_deepspeed(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    tag: str | None = None,
    *,
    parameters: Sequence[Sequence[str]] | None = None,
    allow: Sequence[Any] = (),
) -> str:
    """Convert one of DeepSpeed's checkpoints.

    Args:
        source: Directory passed to DeepSpeed's ``save_checkpoint``.
        destination: Directory for the new checkpoint, with the same tag; updates ``latest``.
        tag: None means the tag in DeepSpeed's ``latest``.
        parameters: Names of trained parameters by optimizer group, in the optimizer's order. Only
            needed at stage 0, where DeepSpeed does not save them, and only if shapes are ambiguous.
        allow: User classes that the files may contain, e.g. ``argparse.Namespace``.

    Returns:
        Directory of the new checkpoint.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointError: If a file is damaged, missing, unsafe, or of an unsupported layout.
    """
    sources = find_sources(Path(source), tag)
    models = [read_pickle(path, allow) for path in sources.model]
    optimizers = [read_pickle(path, allow)["optimizer_state_dict"] for path in sources.optimizer]
    if not optimizers:
        imported = read_stage0(sources, models[0], parameters)
    elif "fp32_flat_groups" in optimizers[0]:
        imported = read_stage3(models, optimizers)
    else:
        imported = read_stages_1_and_2(sources, models[0], optimizers)
    _check_complete(sources, imported)
    return _write(Path(destination), sources.directory.name, imported, models[0])


def _check_complete(sources: Sources, imported: ImportedState) -> None:
    masters = dict.fromkeys(imported.shapes, 0)
    for key, tensor in imported.ranges.items():
        name, _, suffix = key.rpartition("@")
        if suffix.endswith("/master"):
            masters[name] += tensor.numel()
    short = [name for name, shape in imported.shapes.items() if masters[name] != math.prod(shape)]
    if short:
        msg = f"{sources.directory}: elements are missing of {', '.join(short)}"
        raise CheckpointError(msg)


def _engine_state(imported: ImportedState, model: Mapping[str, Any]) -> dict[str, Any]:
    config = model.get("ds_config") or {}
    steps = config.get("gradient_accumulation_steps") or 1
    counters = {
        "global_steps": int(model["global_steps"]),
        "micro_steps": int(model["global_steps"]) * int(steps),
        "skipped_steps": int(model["skipped_steps"]),
        "global_samples": int(model.get("global_samples") or 0),
        "accumulation_steps": int(steps),
    }
    parts: dict[str, Any] = {"counters": {"type": None, "state": counters}}
    if model.get("lr_scheduler") is not None:
        kind = (config.get("scheduler") or {}).get("type")
        parts["lr_scheduler"] = {"type": kind, "state": model["lr_scheduler"]}
    if (scaler := _scaler_state(imported.scaler)) is not None:
        parts["loss_scaler"] = {"type": "DynamicLossScaler", "state": scaler}
    optimizer = {"type": None, "scalars": imported.scalars, "groups": imported.groups}
    return {"optimizer": optimizer, "module": {}, "parts": parts}


def _scaler_state(scaler: Any) -> dict[str, Any] | None:
    values = scaler if isinstance(scaler, Mapping) else vars(scaler) if scaler is not None else {}
    if not (values.get("dynamic") or values.get("dynamic_loss_scale")):
        return None
    state = {
        "scale": float(values["cur_scale"]),
        "step": int(values["cur_iter"]),
        "last_overflow": int(values["last_overflow_iter"]),
    }
    if "cur_hysteresis" in values:
        state["tolerance"] = int(values["cur_hysteresis"])
    return state


def _write(destination: Path, tag: str, imported: ImportedState, model: Mapping[str, Any]) -> str:
    client = {key: value for key, value in model.items() if key not in _MODEL_FILE_KEYS}
    objects = {
        ENGINE_STATE: to_bytes("engine state", _engine_state(imported, model)),
        CLIENT_STATE: to_bytes("client_state", client),
    }
    job = SaveJob(
        ranks=CheckpointRanks(None),
        temporary=create_temporary(destination, check_tag(tag)),
        final=destination / tag,
        save_latest=True,
        manifest=Manifest(tag, imported.stage, imported.world_size, {}, imported.shapes),
        tensors=((key, tensor.clone()) for key, tensor in imported.ranges.items()),
        module_tensors=[(name, value.clone()) for name, value in imported.untrained.items()],
        objects=objects,
    )
    save_now(job)
    return str(job.final)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Convert a DeepSpeed checkpoint to Zerolab's format."
    )
    parser.add_argument("source", help="directory that was passed to DeepSpeed's save_checkpoint")
    parser.add_argument("destination", help="directory for the new checkpoint")
    parser.add_argument("--tag", help="tag to convert; default: the tag in `latest`")
    parser.add_argument("--export", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export:
        sys.stderr.write(f"{_NO_EXPORT}\n")
        return 2
    try:
        path = import_deepspeed(options.source, options.destination, options.tag)
    except ZerolabError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0
