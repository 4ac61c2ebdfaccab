"""Lets Accelerate, transformers and Lightning use DeepSpeed's path on machines without a GPU.

They take DeepSpeed for a matter of GPUs: without one, Accelerate sees no ranks,
``TrainingArguments`` refuses bf16 unless it is told to use the CPU, which turns DeepSpeed off, and
Lightning's strategy refuses any accelerator but CUDA's. These places are changed when their modules
are imported, and only do something else where torch has no GPU.
"""

import importlib
from types import ModuleType
from typing import Any

from zerotrial.compat import after_import

__all__ = ["patch_when_imported"]


def patch_when_imported() -> None:
    """Change the modules now, where they are there already, or as they are imported."""
    after_import.patch_when_imported(_PATCHES)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _patch_accelerate(module: ModuleType) -> None:
    """Ranks of a CPU are ranks, also where DeepSpeed is wanted."""
    state: Any = module.PartialState
    prepare = state._prepare_backend  # noqa: SLF001 - the place that has no public name

    def prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        return prepare(self, cpu or not _has_gpu(), *args, **kwargs)

    state._prepare_backend = prepare_backend  # noqa: SLF001


def _patch_transformers(module: ModuleType) -> None:
    """A CPU computes in bf16; what it asks of the GPU is asked of no one."""
    asked = module.is_torch_bf16_gpu_available

    def is_torch_bf16_gpu_available() -> bool:
        return bool(asked()) or not _has_gpu()

    module.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available  # type: ignore[attr-defined]


def _patch_lightning(module: ModuleType) -> None:
    """Its CPU accelerator is accepted beside CUDA's; the devices of a CPU have no number."""
    if _has_gpu():
        return
    of_cpu = importlib.import_module(_ACCELERATORS[module.__name__])
    module.CUDAAccelerator = (module.CUDAAccelerator, of_cpu.CPUAccelerator)  # type: ignore[attr-defined]
    check = module._validate_device_index_selection  # noqa: SLF001 - as above

    def validate_device_index_selection(parallel_devices: list[Any]) -> None:
        check([device for device in parallel_devices if device.type != "cpu"])

    module._validate_device_index_selection = validate_device_index_selection  # type: ignore[attr-defined] # noqa: SLF001


_ACCELERATORS = {
    "lightning.fabric.strategies.deepspeed": "lightning.fabric.accelerators.cpu",
    "lightning.pytorch.strategies.deepspeed": "lightning.pytorch.accelerators.cpu",
    "lightning_fabric.strategies.deepspeed": "lightning_fabric.accelerators.cpu",
    "pytorch_lightning.strategies.deepspeed": "pytorch_lightning.accelerators.cpu",
}
"""Lightning's two strategies, each in its two distributions, to where their CPU accelerator is."""

_PATCHES: dict[str, after_import.Patch] = {
    "accelerate.state": _patch_accelerate,
    "transformers.training_args": _patch_transformers,
    **dict.fromkeys(_ACCELERATORS, _patch_lightning),
}
"""Module to what is changed in it."""
