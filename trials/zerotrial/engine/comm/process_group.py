"""Starting torch.distributed for a script that has not, and leaving it when the script ends."""

import atexit
import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["leave_world", "start_world"]


def start_world(
    backend: str,
    *,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed, to be left when the process ends. **Collective**.

    Args:
        backend: nccl or gloo.
        init_method: As in ``torch.distributed.init_process_group``, as are the others.
        timeout: Of collectives; torch's by default.
        store: By which the ranks meet; the environment's by default.
        rank: Of this process; from the environment by default.
        world_size: Number of ranks; from the environment by default.
    """
    dist.init_process_group(
        backend, init_method, timeout, world_size=world_size, rank=rank, store=store
    )
    atexit.unregister(_leave)
    atexit.register(_leave)


def leave_world() -> None:
    """Destroy all process groups.

    Not collective, but every rank calls it when it has finished its last collective.
    """
    # torch 2.7 may deadlock here: the destructor holds the interpreter lock and waits for a Gloo
    # thread, which needs the lock to free the tensors of the last collective. Nothing reports
    # that it has freed them. Also with NCCL, whose jobs have Gloo groups for CPU tensors.
    if torch.__version__ < "2.8":
        time.sleep(0.1)
    dist.destroy_process_group()


def _leave() -> None:
    """End gloo's threads before the interpreter: one that lets go of a tensor later aborts.

    The ranks need not come here together. NCCL's groups are left to torch, whose end waits for
    ranks that may be gone.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # what holds a group keeps its threads
        leave_world()
        gc.collect()
