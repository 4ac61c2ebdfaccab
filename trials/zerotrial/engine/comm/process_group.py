"""Start and orderly shutdown of torch.distributed for scripts that did not start it."""

import atexit
import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["destroy_process_groups", "start_process_group"]


def start_process_group(
    backend: str,
    *,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed, and shut it down when the process ends. **Collective**.

    Args:
        backend: ``nccl`` or ``gloo``.
        init_method: See ``torch.distributed.init_process_group``.
        timeout: Timeout of collectives; torch's by default.
        store: Rendezvous store; from the environment by default.
        rank: Rank of this process; from the environment by default.
        world_size: Number of ranks; from the environment by default.
    """
    dist.init_process_group(
        backend, init_method, timeout, world_size=world_size, rank=rank, store=store
    )
    atexit.unregister(_destroy_gloo_groups)
    atexit.register(_destroy_gloo_groups)


def destroy_process_groups() -> None:
    """Destroy all process groups.

    Not collective, but every rank calls it after its last collective.
    """
    # torch 2.7 may deadlock here: the destructor holds the interpreter lock and waits for a
    # Gloo thread, which needs the lock to free the tensors of the last collective. Nothing
    # reports when they are freed. NCCL jobs are affected, too: they have Gloo groups for CPU.
    if torch.__version__ < "2.8":
        time.sleep(0.1)
    dist.destroy_process_group()


def _destroy_gloo_groups() -> None:
    """End gloo's threads before the interpreter does: freeing a tensor later would abort.

    The ranks need not arrive together. NCCL groups are left to torch, whose shutdown waits
    for ranks that may have died.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # objects that hold a group keep its threads alive
        destroy_process_groups()
        gc.collect()
