"""Types in which a model computes, accumulates and communicates."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.config.engine.engine_config import EngineConfig

__all__ = [
    "DTYPES",
    "Precision",
    "cast_inputs",
    "choose_precision",
    "register_input_cast",
    "uncast_parameters",
]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Configuration names of torch's types."""


@dataclass(frozen=True)
class Precision:
    """Types in which a model computes, accumulates and communicates."""

    compute: torch.dtype | None
    """Type of parameters and activations: bf16 or fp16; None keeps each parameter's type."""

    accumulate: torch.dtype | None = None
    """Accumulation type of gradients over micro-batches; None means the parameter's type."""

    communicate: torch.dtype | None = None
    """Communication type of gradients; None means the stage's cheapest."""

    master: torch.dtype = torch.float32
    """Type of the weights that the optimizer updates."""

    cast_inputs: bool = False
    """Whether floating-point inputs of the module are cast to ``compute``."""


def choose_precision(config: EngineConfig, accumulation_steps: int) -> Precision:
    """Return the types for ``fp16``, ``bf16``, ``data_types`` and ``communication_data_type``.

    By default 16-bit gradients are summed over micro-batches in fp32. With a single micro-batch
    there is no sum, and gradients keep their type.
    """
    compute = DTYPES[config.dtype] if config.dtype != "fp32" else None
    chosen = config.data_types.grad_accum_dtype
    sent = config.communication_data_type
    accumulate = DTYPES[chosen] if chosen is not None else None
    sums = config.sums_micro_batches(accumulation_steps)
    if accumulate is None and compute is not None and sums:
        accumulate = torch.float32
    return Precision(
        compute=compute,
        accumulate=accumulate,
        communicate=DTYPES[sent] if sent is not None else None,
        cast_inputs=compute is not None,
    )


def uncast_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that keep their type: those of batch norms.

    Their running statistics are fp32, and torch requires weights and statistics of one type; it
    accepts 16-bit inputs nevertheless.
    """
    return {
        parameter
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - their common base
        for parameter in layer.parameters(recurse=False)
    }


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_inputs(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_inputs(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if is_dataclass(value) and not isinstance(value, type):
        parts = [part.name for part in fields(value) if part.init]
        return replace(value, **{name: cast_inputs(getattr(value, name), dtype) for name in parts})
    return value


def _cast_mapping(value: Any, dtype: torch.dtype) -> Any:
    """Cast a mapping that can be copied and written, such as a BatchEncoding, keeping its type."""
    try:
        copied = copy(value)
        for key, item in value.items():
            copied[key] = cast_inputs(item, dtype)
    except (AttributeError, TypeError):
        return value
    return copied


def register_input_cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point inputs of a module's forward."""
    module.register_forward_pre_hook(_InputCast(dtype), with_kwargs=True)


@dataclass(frozen=True)
class _InputCast:
    """Forward hook that can be pickled with its module."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_inputs(args, self.dtype), cast_inputs(kwargs, self.dtype)
