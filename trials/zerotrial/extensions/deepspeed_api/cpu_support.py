"""Enables the DeepSpeed path of Accelerate, transformers and Lightning without a GPU.

They assume that DeepSpeed needs GPUs. Accelerate then sees no ranks,
``TrainingArguments`` rejects bf16 unless configured for the CPU, which turns DeepSpeed off, and
Lightning's strategy refuses all accelerators except CUDA's. These places are patched when their
modules are imported. The patches act only if torch has no GPU.
"""

import importlib
from types import ModuleType
from typing import Any

from zerotrial.extensions import after_import

__all__ = ["patch_when_imported"]


def patch_when_imported() -> None:
    """Patch the modules now if they are imported already, else on import."""
    after_import.patch_when_imported(_PATCHES)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _patch_accelerate(module: ModuleType) -> None:
    """Count CPU ranks even if DeepSpeed is used."""
    state: Any = module.PartialState
    prepare = state._prepare_backend  # noqa: SLF001 - the place that has no public name

    def prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        return prepare(self, cpu or not _has_gpu(), *args, **kwargs)

    state._prepare_backend = prepare_backend  # noqa: SLF001


def _patch_transformers(module: ModuleType) -> None:
    """Accept bf16, which CPUs support, and skip the checks of the GPU."""
    original = module.is_torch_bf16_gpu_available

    def is_torch_bf16_gpu_available() -> bool:
        return bool(original()) or not _has_gpu()

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
