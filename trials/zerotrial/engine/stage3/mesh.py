"""Device mesh of the stage 3 ranks for ``fully_shard``, even for a single process.

``fully_shard`` needs torch.distributed. For a single process without it, it is initialized here for
this process only, and destroyed when the last engine that uses it is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zerotrial.engine.comm.process_group import destroy_process_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from zerotrial.engine.protocols import StageInputs

_users = 0
"""Open engines that use the process group created here; 0 if there is none."""


def open_mesh(inputs: StageInputs) -> tuple[DeviceMesh, Callable[[], None]]:
    """Create the device mesh. **Collective** over several ranks.

    Args:
        inputs: Inputs of the stage; its shard axis defines the ranks.

    Returns:
        The mesh and a function to call when the engine is closed.
    """
    global _users
    kind = inputs.device.type
    is_own = _users > 0
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        is_own = True
    _users += is_own
    return inputs.mesh.shard.device_mesh(
        kind
    ), _release_process_group if is_own else _keep_process_group


def _keep_process_group() -> None:
    """Do nothing: torch.distributed was initialized elsewhere."""


def _release_process_group() -> None:
    global _users
    _users -= 1
    if _users == 0 and dist.is_initialized():
        destroy_process_groups()
