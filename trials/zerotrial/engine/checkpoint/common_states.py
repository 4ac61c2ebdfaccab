"""Optimizer states under keys that are not parameters: equal on all ranks, saved once."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerolab.formatting import first_few
from zerotrial.engine.checkpoint.files import CheckpointError, CheckpointRanks
from zerotrial.engine.update.optimizer_states import (
    common_states,
    on_device,
    set_common_states,
    tensors_within,
)

__all__ = ["saved_common_states", "set_saved_common_states"]

_VALUES, _ON_HOST = "values", "on_host"


def saved_common_states(optimizer: torch.optim.Optimizer, ranks: CheckpointRanks) -> dict[str, Any]:
    """Return the common states of an optimizer for a checkpoint. **Collective**.

    Raises:
        CheckpointError: If they differ between ranks.
    """
    states = common_states(optimizer)
    digests = ranks.allgather({key: _digest(value) for key, value in states.items()})
    if differing := {
        repr(k) for local in digests for k in local if any(o.get(k) != local[k] for o in digests)
    }:
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} must keep the same on all ranks under keys "
            f"that are no parameters, got other values, or none, on some of {ranks.size} ranks for "
            f"{', '.join(first_few(sorted(differing)))}; sum them over the ranks in step(), or "
            "keep them with each parameter"
        )
    return {_VALUES: states, _ON_HOST: [k for k, v in states.items() if _is_on_host(v)]}


def set_saved_common_states(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the result of :func:`saved_common_states`.

    Args:
        optimizer: The engine's optimizer.
        saved: Saved states; empty in checkpoints of versions that saved none.
    """
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    device = next(iter(devices), torch.device("cpu"))
    set_common_states(
        optimizer,
        {
            key: value if key in saved[_ON_HOST] else on_device(value, device)
            for key, value in saved.get(_VALUES, {}).items()
        },
    )


def _is_on_host(value: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_within(value))


def _digest(value: Any) -> Any:
    """Return a small value that is equal for equal states."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.blake2b(content).digest()
    if isinstance(value, dict):
        return {key: _digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(item) for item in value]
    return repr(value)
