"""DeepSpeed's checkpoints, stages 0 to 3, made into ours.

The result loads at any stage and number of ranks, like every checkpoint::

    import_deepspeed("ds_run", "run")  # or: python -m zerotrial.engine.checkpoint.deepspeed A B
    engine.load_checkpoint("run")

What DeepSpeed does not save cannot come along: random generators, and the place in a window of
accumulation.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from zerolab.errors import ZerolabError
from zerotrial.engine.checkpoint.deepspeed.files import Sources, find_sources, read_pickle
from zerotrial.engine.checkpoint.deepspeed.stages import (
    Found,
    read_stage0,
    read_stage3,
    read_stages_1_and_2,
)
from zerotrial.engine.checkpoint.files import (
    CheckpointError,
    Manifest,
    check_tag,
    create_temporary,
)
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.save import SaveJob, save_now
from zerotrial.engine.checkpoint.state import CLIENT_STATE, ENGINE_STATE, to_bytes

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
"""Keys that DeepSpeed writes into a model file; every other key is the user's client state."""

_NO_EXPORT = (
    "--export: was removed, checkpoints are not converted to DeepSpeed's format; write the weights "
    "with engine.export(PATH), or read them with "
    "zerotrial.engine.checkpoint.export.read_weights(DIR), and load them into the model before "
    "deepspeed.initialize()"
)


def import_deepspeed(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    tag: str | None = None,
    *,
    parameters: Sequence[Sequence[str]] | None = None,
    allow: Sequence[Any] = (),
) -> str:
    """Make a checkpoint of ours from one of DeepSpeed's.

    Args:
        source: As it was passed to DeepSpeed's ``save_checkpoint``.
        destination: Holds the new checkpoint, under the same tag; ``latest`` names it.
        tag: None means the one that DeepSpeed's ``latest`` names.
        parameters: Names of trained parameters by optimizer group, in the optimizer's order. Needed
            at stage 0 only, where DeepSpeed does not save them, and only if shapes leave a doubt.
        allow: Classes of the user's that the files may contain, e.g. ``argparse.Namespace``.

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
        found = read_stage0(sources, models[0], parameters)
    elif "fp32_flat_groups" in optimizers[0]:
        found = read_stage3(models, optimizers)
    else:
        found = read_stages_1_and_2(sources, models[0], optimizers)
    _check_complete(sources, found)
    return _write(Path(destination), sources.directory.name, found, models[0])


def _check_complete(sources: Sources, found: Found) -> None:
    masters = dict.fromkeys(found.shapes, 0)
    for key, tensor in found.ranges.items():
        name, _, rest = key.rpartition("@")
        if rest.endswith("/master"):
            masters[name] += tensor.numel()
    short = [name for name, shape in found.shapes.items() if masters[name] != math.prod(shape)]
    if short:
        msg = f"{sources.directory}: elements are missing of {', '.join(short)}"
        raise CheckpointError(msg)


def _engine_state(found: Found, model: Mapping[str, Any]) -> dict[str, Any]:
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
    if (scaler := _scaler_state(found.scaler)) is not None:
        parts["loss_scaler"] = {"type": "DynamicLossScaler", "state": scaler}
    optimizer = {"type": None, "scalars": found.scalars, "groups": found.groups}
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


def _write(destination: Path, tag: str, found: Found, model: Mapping[str, Any]) -> str:
    client = {key: value for key, value in model.items() if key not in _MODEL_FILE_KEYS}
    objects = {
        ENGINE_STATE: to_bytes("engine state", _engine_state(found, model)),
        CLIENT_STATE: to_bytes("client_state", client),
    }
    job = SaveJob(
        ranks=CheckpointRanks(None),
        temporary=create_temporary(destination, check_tag(tag)),
        final=destination / tag,
        save_latest=True,
        manifest=Manifest(tag, found.stage, found.world_size, {}, found.shapes),
        tensors=((key, tensor.clone()) for key, tensor in found.ranges.items()),
        module_tensors=[(name, value.clone()) for name, value in found.whole.items()],
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
