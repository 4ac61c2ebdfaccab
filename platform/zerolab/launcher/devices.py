"""The GPUs of this machine, and the slots that it offers."""

import os

from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError
from zerolab.linux import usable_cores

__all__ = ["find_gpus", "find_slots"]


def find_gpus() -> list[SlotInfo]:
    """Find the GPUs that this process may use, with the driver's numbers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [
            SlotInfo(index, f"cuda:{index} {_text(pynvml.nvmlDeviceGetName(handle))}")
            for index, handle in (
                (index, pynvml.nvmlDeviceGetHandleByIndex(index))
                for index in range(pynvml.nvmlDeviceGetCount())
            )
            if named is None or _is_named(index, _text(pynvml.nvmlDeviceGetUUID(handle)), named)
        ]
    finally:
        pynvml.nvmlShutdown()


def _is_named(index: int, uuid: str, visible_devices: str) -> bool:
    """Return whether a list of numbers or (abbreviated) uuids names a GPU."""
    names = [name.strip() for name in visible_devices.split(",")]
    return any(
        name == str(index) or (name[:4] == "GPU-" and uuid.startswith(name)) for name in names
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
