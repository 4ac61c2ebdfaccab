"""Devices that this machine offers as slots, and the variables of runs on them."""

from collections.abc import Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError
from zerolab.launcher.devices import find_gpus
from zerolab.linux import usable_cores

__all__ = ["find_slots", "run_environment"]


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


def run_environment(slots: Sequence[SlotInfo], slot_ids: Sequence[int]) -> dict[str, str]:
    """Return the variables that confine a run to its slots.

    Args:
        slots: All slots of this machine; the cores are divided among them for the ranks' threads.
        slot_ids: Slots of the run.
    """
    threads = max(1, usable_cores() // len(slots))
    environment = {"OMP_NUM_THREADS": str(threads)}
    if any(slot.device.startswith("cuda") for slot in slots):
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of the slots' numbers
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot) for slot in slot_ids)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
