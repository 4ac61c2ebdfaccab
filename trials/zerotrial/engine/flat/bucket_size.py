"""Bucket sizes: one policy for the stages and for ``zerolab plan``."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from zerolab.config.engine.zero import ZeroConfig
from zerotrial.engine.flat.layout import build_buckets
from zerotrial.engine.protocols import NamedParameter, ParamGroup

__all__ = ["choose_bucket_numel", "largest_bucket"]

_OVERLAP_PARTS = 8  # number of buckets without a configured size
_SMALLEST = 1 << 20  # elements; a smaller collective costs more than it hides
_LARGEST_ON_HOST = 1 << 24  # elements updated by the CPU; more fall out of its cache
_LARGEST_ON_GPU = 1 << 27  # elements; their update hides the launch of the next one


def choose_bucket_numel(
    zero: ZeroConfig,
    numel: int,
    *,
    stage: int,
    offload_optimizer: Literal["none", "cpu", "nvme"],
    device: str,
) -> int:
    """Return the largest number of elements of a bucket: configured, or a part of the model.

    Args:
        zero: ``zero_optimization``; its ``stage`` and offload settings are ignored.
        numel: Number of trained elements of the model.
        stage: 0, 1 or 2.
        offload_optimizer: Memory of the optimizer states.
        device: Type of the training device: ``cpu``, or another.

    Returns:
        A number from 1 to ``numel``.
    """
    limit = zero.reduce_bucket_size
    if stage:
        limit = min(limit, zero.allgather_bucket_size)
    if zero.overlap_comm is not False and "reduce_bucket_size" not in zero.model_fields_set:
        part = max(numel // _OVERLAP_PARTS, _SMALLEST)
        on_host = device == "cpu" or offload_optimizer != "none"
        limit = min(limit, part, _LARGEST_ON_HOST if on_host else _LARGEST_ON_GPU)
    if offload_optimizer == "nvme":
        limit = min(limit, _LARGEST_ON_HOST)  # three buckets of states are in memory at a time
    return max(1, min(limit, numel))


def largest_bucket(
    sizes: Sequence[Sequence[int]], bucket_numel: int, ranks: int, *, whole_parameters: bool = False
) -> int:
    """Return the size of the largest bucket; a parameter is never split over two buckets.

    Args:
        sizes: Elements of each trained parameter, by optimizer group, in module order.
        bucket_numel: Limit from :func:`choose_bucket_numel`.
        ranks: N.
        whole_parameters: Whether the optimizer needs full parameters.

    Returns:
        Elements, padding included; 0 without parameters.
    """
    groups = [
        ParamGroup(
            [
                NamedParameter(
                    f"{index}.{position}", nn.Parameter(torch.empty(size, device="meta"))
                )
                for position, size in enumerate(members)
            ]
        )
        for index, members in enumerate(sizes)
    ]
    buckets = build_buckets(
        groups,
        [named.name for group in groups for named in group.parameters],
        bucket_numel,
        ranks,
        None,
        whole_parameters=whole_parameters,
    )
    return max((bucket.numel for bucket in buckets), default=0)
