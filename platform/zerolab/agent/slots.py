"""Devices that this machine offers as slots."""

from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError
from zerolab.launcher.devices import find_gpus
from zerolab.linux import usable_cores

__all__ = ["find_slots"]


def find_slots(count: int | None = None, *, cpu: bool = False) -> list[SlotInfo]:
    """Find the slots of this machine: its GPUs, or else one for each CPU core.

    Args:
        count: Number of slots; all if None. There may be more CPU slots than cores.
        cpu: Offer CPU slots even if there are GPUs.

    Raises:
        ConfigError: If ``count`` is not positive, or more than there are GPUs.
    """
    if count is not None and count < 1:
        raise ConfigError("slots", [f"must be at least 1, got {count}"])
    gpus = [] if cpu else find_gpus()
    if not gpus:
        return [SlotInfo(index, "cpu") for index in range(count or usable_cores())]
    if count is not None and count > len(gpus):
        problem = f"must be at most {len(gpus)}, the GPUs found, got {count}; or offer CPU slots"
        raise ConfigError("slots", [f"{problem} with --cpu"])
    return gpus[:count]
