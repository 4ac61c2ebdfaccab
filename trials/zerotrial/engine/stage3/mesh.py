"""The ranks of a stage 3 engine as ``fully_shard`` wants them: a mesh, even of one process.

``fully_shard`` needs torch.distributed. Where a process is alone and nobody has started it, it is
started here, for this process only, and ended when the last engine that uses it is closed.
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
"""Open engines in a world of one that was started here; 0 when there is no such world."""


def open_mesh(inputs: StageInputs) -> tuple[DeviceMesh, Callable[[], None]]:
    """Make the mesh. **Collective** where there are several ranks.

    Args:
        inputs: Of the stage; its shard axis are the ranks.

    Returns:
        The mesh, and what to call when the engine is closed.
    """
    global _users
    kind = inputs.device.type
    ours = _users > 0
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        ours = True
    _users += ours
    return inputs.mesh.shard.device_mesh(kind), _leave if ours else _stay


def _stay() -> None:
    """Others have started torch.distributed, and end it."""


def _leave() -> None:
    global _users
    _users -= 1
    if _users == 0 and dist.is_initialized():
        destroy_process_groups()
