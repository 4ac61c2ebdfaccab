"""What an optimizer keeps under keys that are no parameters: the same on all ranks, saved once."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerolab.formatting import first_few
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.update.optimizer_states import (
    common_states,
    on_device,
    set_common_states,
    tensors_within,
)

__all__ = ["saved_common_states", "set_saved_common_states"]

_VALUES, _ON_HOST = "values", "on_host"


def saved_common_states(optimizer: torch.optim.Optimizer, ranks: CheckpointRanks) -> dict[str, Any]:
    """Return what a checkpoint is to have of them. **Collective**.

    Args:
        optimizer: The engine's.
        ranks: That save together.

    Raises:
        CheckpointError: If they are not the same on all ranks.
    """
    states = common_states(optimizer)
    told = ranks.allgather({key: _digest(value) for key, value in states.items()})
    if apart := {repr(k) for mine in told for k in mine if any(o.get(k) != mine[k] for o in told)}:
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} must keep the same on all ranks under keys "
            f"that are no parameters, got other values, or none, on some of {ranks.size} ranks for "
            f"{', '.join(first_few(sorted(apart)))}; sum them over the ranks in step(), or keep "
            "them with each parameter"
        )
    return {_VALUES: states, _ON_HOST: [k for k, v in states.items() if _is_on_host(v)]}


def set_saved_common_states(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what :func:`saved_common_states` gave.

    Args:
        optimizer: The engine's.
        saved: Empty, where the checkpoint is of a version that saved none.
    """
    places = {p.device for group in optimizer.param_groups for p in group["params"]}
    device = next(iter(places), torch.device("cpu"))
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
    """What is equal where values are, small however large they are."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.blake2b(content).digest()
    if isinstance(value, dict):
        return {key: _digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(item) for item in value]
    return repr(value)
