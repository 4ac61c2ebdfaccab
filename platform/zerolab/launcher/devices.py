"""The GPUs of this machine."""

import os

from zerolab.contract.messages import SlotInfo

__all__ = ["find_gpus"]


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
