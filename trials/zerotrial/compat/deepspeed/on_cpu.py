"""Lets Accelerate and transformers use DeepSpeed's path on machines without a GPU.

They take DeepSpeed for a matter of GPUs: without one, Accelerate sees no ranks, and
``TrainingArguments`` refuses bf16 unless it is told to use the CPU, which turns DeepSpeed off. The
two places are changed when their modules are imported, and only where torch has no GPU.
"""

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


_PATCHES: dict[str, after_import.Patch] = {
    "accelerate.state": _patch_accelerate,
    "transformers.training_args": _patch_transformers,
}
"""Module to what is changed in it."""
