"""Check that ranks which share one replica of a model read the same micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.errors import EngineError

__all__ = ["check_batches"]


def check_batches(
    module: nn.Module, group: Any, ranks: int, key: str, *, prepend: bool = False
) -> Any:
    """Compare the arguments of the model's first forward between ranks.

    Args:
        module: The model; its first forward becomes **collective** over the group.
        group: Process group of the ranks.
        ranks: Number of ranks.
        key: Configuration key for the error.
        prepend: Whether to compare before other hooks change the arguments.

    Returns:
        Handle of the hook.
    """

    def compare(_module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        fingerprints: list[Any] = [None] * ranks
        dist.all_gather_object(fingerprints, _fingerprint([args, kwargs]), group=group)
        if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
            raise EngineError(
                f"{key}: the ranks of one model replica must read the same micro-batch, "
                "but the first one differs; let loaders divide the data by engine.mesh.replica "
                "and .replicas, not by all ranks"
            )

    handle = module.register_forward_pre_hook(compare, with_kwargs=True, prepend=prepend)
    return handle


def _fingerprint(value: Any) -> list[Any]:
    """Return shapes and sums of all tensors: cheap, and enough to distinguish batches."""
    if isinstance(value, Tensor):
        wide = value.detach().double().reshape(-1)
        positions = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
        return [
            tuple(value.shape),
            str(float(wide.sum())),
            str(float(torch.dot(wide, positions.sqrt()))),
        ]
    if isinstance(value, Mapping):
        return [part for key in sorted(map(str, value)) for part in _fingerprint(value[key])]
    if isinstance(value, list | tuple):
        return [part for item in value for part in _fingerprint(item)]
    return []
