"""Selection of the communicator."""

import torch
import torch.distributed as dist

from zerotrial.engine.comm.communicator import Communicator, GroupCommunicator, SoloCommunicator
from zerotrial.engine.protocols import ENGINE_PARTS

__all__ = ["connect"]


def connect(group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """Return the fastest communicator for the ranks of a group. **Collective**.

    Args:
        group: Data-parallel ranks; None for one process.
        device: Device of the buffers.

    Returns:
        Shared memory for CPU ranks of one host, torch's collectives otherwise.
    """
    if group is None or dist.get_world_size(group) == 1:
        return SoloCommunicator()
    if device.type == "cpu" and "shared_memory" in ENGINE_PARTS:
        shared: Communicator | None = ENGINE_PARTS["shared_memory"](group)
        if shared is not None:
            return shared
    return GroupCommunicator(group, device)
