"""``deepspeed.comm``: torch.distributed under its other name."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_process_group_ranks,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from zerotrial.extensions.scripts import init_distributed as start

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

logger = logging.getLogger(__name__)


def init_distributed(dist_backend: str | None = None, *args: Any, **options: Any) -> None:
    """Start torch.distributed, unless it is running. **Collective**.

    Args:
        dist_backend: nccl, which scripts use for GPUs, becomes gloo without GPUs.
        args: As :func:`zerotrial.init_distributed`.
        options: As ``args``, by name.
    """
    if dist_backend in {"nccl", "ccl"} and not torch.cuda.is_available():
        if not dist.is_initialized():
            logger.info("init_distributed(%r): there is no GPU here: gloo is used", dist_backend)
        dist_backend = "gloo"
    start(dist_backend, *args, **options)


def get_rank(group: Any = None) -> int:
    """This process's rank; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Number of ranks; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This process's rank on its machine."""
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """All ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any, group_rank: int) -> int:
    """The rank among all of one in a group."""
    return dist.get_global_rank(group, group_rank)
