"""How large buckets are: the one policy, which the stages use and ``zerolab plan`` asks."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from zerolab.config.engine.zero import ZeroConfig
from zerotrial.engine.flat.layout import cut_into_buckets
from zerotrial.engine.protocols import NamedParameter, ParamGroup

__all__ = ["choose_bucket_numel", "largest_bucket"]

_OVERLAP_PARTS = 8  # buckets of a model whose file names no size
_SMALLEST = 1 << 20  # elements; below, a collective costs more than it hides
_LARGEST_ON_HOST = 1 << 24  # elements, updated by the CPU; larger ones fall out of the cache
_LARGEST_ON_GPU = 1 << 27  # elements; their update keeps a GPU busy while the host starts the next


def choose_bucket_numel(
    zero: ZeroConfig,
    numel: int,
    *,
    stage: int,
    offload_optimizer: Literal["none", "cpu", "nvme"],
    device: str,
) -> int:
    """Choose how many elements a bucket may have: what the file says, else a part of the model.

    Args:
        zero: Of the file; its own stage and offload are not looked at.
        numel: Trained elements of the model.
        stage: 0, 1 or 2.
        offload_optimizer: Where optimizer states live.
        device: That trains: ``cpu``, or another.

    Returns:
        At least 1, and no more than the model has.
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
    """Say how large the largest bucket becomes, since no parameter is parted over two.

    Args:
        sizes: Elements of each trained parameter, by optimizer group, in the order of the module.
        bucket_numel: From :func:`choose_bucket_numel`.
        ranks: N.
        whole_parameters: Whether the optimizer looks at whole parameters.

    Returns:
        Elements, padding included; 0 without parameters.
    """
    groups = [
        ParamGroup(
            [
                NamedParameter(f"{index}.{place}", nn.Parameter(torch.empty(size, device="meta")))
                for place, size in enumerate(members)
            ]
        )
        for index, members in enumerate(sizes)
    ]
    buckets = cut_into_buckets(
        groups,
        [named.name for group in groups for named in group.parameters],
        bucket_numel,
        ranks,
        None,
        whole_parameters=whole_parameters,
    )
    return max((bucket.numel for bucket in buckets), default=0)
