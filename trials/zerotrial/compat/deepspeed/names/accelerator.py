"""``deepspeed.accelerator``: where tensors live."""

import os
from typing import Any

import torch

__all__ = ["get_accelerator"]


class _Accelerator:
    """The GPU of this process, else the CPU; what it lacks is torch's."""

    def device_name(self, device_index: int | str | None = None) -> str:
        """``cuda``, ``cuda:1`` or ``cpu``."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """Of this process."""
        return self.device_name(self.current_device() if torch.cuda.is_available() else None)

    def current_device(self) -> Any:
        """Index of the GPU, or ``cpu``."""
        return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"

    def communication_backend_name(self) -> str:
        """Of torch.distributed."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_available(self) -> bool:
        """A CPU always is."""
        return True

    def device_count(self) -> int:
        """GPUs, or ranks of this machine on a CPU."""
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def empty_cache(self) -> None:
        """Give the GPU's unused memory back."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if torch.cuda.is_available() else torch.cpu, name)


_accelerator = _Accelerator()


def get_accelerator() -> Any:
    """Return the one of this process."""
    return _accelerator
