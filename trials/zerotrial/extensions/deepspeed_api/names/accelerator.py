"""``deepspeed.accelerator``: where tensors live."""

import os
from contextlib import nullcontext
from typing import Any

import psutil
import torch

__all__ = ["get_accelerator"]


_cuda: Any = torch.cuda


class _Accelerator:
    """Members that are the same for GPU and CPU."""

    BFloat16Tensor = torch.BFloat16Tensor
    ByteTensor = torch.ByteTensor
    DoubleTensor = torch.DoubleTensor
    FloatTensor = torch.FloatTensor
    HalfTensor = torch.HalfTensor
    IntTensor = torch.IntTensor
    LongTensor = torch.LongTensor

    _compile_backend = "inductor"

    def is_available(self) -> bool:
        """A CPU always is."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Types in which models may compute."""
        half = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *half]

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return True

    def random(self) -> Any:
        """The module of random numbers."""
        return torch.random

    def initial_seed(self) -> int:
        """Return the seed of the generator."""
        return torch.initial_seed()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self.device_name()

    def device_name(self, device_index: int | str | None = None) -> str:
        """``cuda``, ``cuda:1`` or ``cpu``."""
        raise NotImplementedError

    def get_compile_backend(self) -> str:
        """Of :func:`torch.compile`."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Store the backend for :meth:`get_compile_backend`."""
        self._compile_backend = backend

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when it is done."""
        return self.device_name() == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = (
        is_synchronized_device
    )

    def __getattr__(self, name: str) -> Any:
        device = self.device_name()
        try:
            return getattr(torch.get_device_module(device), name)
        except AttributeError:
            msg = (
                f"get_accelerator().{name}: Zerolab replaces deepspeed, and does not "
                f"provide it; nor does torch.{device}"
            )
            raise AttributeError(msg, name=name, obj=self) from None


class _Cuda(_Accelerator):
    """The GPU of this process; other attributes come from ``torch.cuda``."""

    BFloat16Tensor = _cuda.BFloat16Tensor
    ByteTensor = _cuda.ByteTensor
    DoubleTensor = _cuda.DoubleTensor
    FloatTensor = _cuda.FloatTensor
    HalfTensor = _cuda.HalfTensor
    IntTensor = _cuda.IntTensor
    LongTensor = _cuda.LongTensor

    def device_name(self, device_index: int | str | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """Of this process."""
        return self.device_name(torch.cuda.current_device())

    def communication_backend_name(self) -> str:
        """Of torch.distributed."""
        return "nccl"

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_triton_supported(self) -> bool:
        """Whether kernels of triton run."""
        return torch.cuda.get_device_capability()[0] >= 7

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Of the GPU's random numbers."""
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU."""
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes."""
        return self.total_memory(device_index) - torch.cuda.memory_allocated(device_index)

    def amp(self) -> Any:
        """The module of automatic mixed precision."""
        return torch.cuda.amp

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Copy a tensor into memory that the GPU reads."""
        del align_bytes
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the GPU reads a tensor's memory."""
        return tensor.is_pinned()

    def lazy_call(self, callback: Any) -> None:
        """Call it when the GPU is used first."""
        _cuda._lazy_call(callback)  # noqa: SLF001 - as DeepSpeed does

    def range_push(self, message: str) -> Any:
        """Begin a range of the profiler."""
        return _cuda.nvtx.range_push(message)

    def range_pop(self) -> Any:
        """End it."""
        return _cuda.nvtx.range_pop()


class _Cpu(_Accelerator):
    """The CPU; a process counts its own memory, in bytes."""

    Stream = Event = None

    def device_name(self, device_index: int | str | None = None) -> str:
        del device_index
        return "cpu"

    def current_device_name(self) -> str:
        """Of this process."""
        return "cpu"

    def current_device(self) -> str:
        """``cpu``."""
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        """A ``with`` block that changes nothing."""
        del device_index
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def device_count(self) -> int:
        """Ranks of this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def communication_backend_name(self) -> str:
        """Of torch.distributed."""
        return "gloo"

    def is_triton_supported(self) -> bool:
        """No kernels of triton run."""
        return False

    def empty_cache(self) -> None:
        """Do nothing."""

    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the random numbers."""
        del device_index
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put a state back."""
        del device_index
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """Of the random numbers."""
        del device_index
        return torch.default_generator

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that this process holds."""
        del device_index
        return int(psutil.Process().memory_info().rss)

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that this process has held at most, since it began."""
        import resource

        del device_index
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Do nothing: the system counts on."""

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Bytes held, by the names of torch.cuda."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "allocated_bytes.all.peak": self.max_memory_allocated(device_index),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine."""
        del device_index
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes."""
        del device_index
        return int(psutil.virtual_memory().available)

    def amp(self) -> Any:
        """The module of automatic mixed precision."""
        return torch.cpu.amp

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor: there is no GPU to read it."""
        del align_bytes
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a GPU reads a tensor's memory."""
        return tensor.is_pinned()

    def lazy_call(self, callback: Any) -> None:
        """Call it."""
        callback()

    def range_push(self, message: str) -> None:
        """Do nothing."""

    def range_pop(self) -> None:
        """Do nothing."""


_accelerator: _Accelerator | None = None


def get_accelerator() -> Any:
    """Return the accelerator of this process: its GPU, else the CPU."""
    global _accelerator
    if _accelerator is None:
        _accelerator = _Cuda() if torch.cuda.is_available() else _Cpu()
    return _accelerator
