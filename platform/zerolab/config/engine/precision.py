"""The ``fp16``, ``bf16`` and ``data_types`` blocks."""

from typing import Literal

from zerolab.schema.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section, hint

__all__ = ["Bf16Config", "DType", "DataTypesConfig", "Fp16Config"]

DType = Literal["fp32", "fp16", "bf16"]


class Fp16Config(Section):
    """16-bit floats with loss scaling."""

    enabled: bool = False
    """Train in fp16, with fp32 master weights."""

    auto_cast: bool = hint(
        default=False, reason="floating-point inputs of the model are always cast to its dtype"
    )
    """Cast inputs to fp16."""

    loss_scale: NonNegativeFloat = 0.0
    """A fixed loss scale; 0 means a dynamic one."""

    initial_scale_power: NonNegativeInt = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: PositiveInt = 1000
    """Clean optimizer steps after which the scale doubles."""

    hysteresis: PositiveInt = 2
    """Overflows that are tolerated before the scale is halved."""

    consecutive_hysteresis: bool = False
    """A clean step restores the tolerance."""

    min_loss_scale: PositiveInt = 1
    """The dynamic scale never falls below this."""


class Bf16Config(Section):
    """bfloat16, which needs no loss scaling."""

    enabled: bool = False
    """Train in bf16, with fp32 master weights."""

    immediate_grad_update: bool = hint(
        default=False, reason="gradients are accumulated as soon as backward produces them"
    )
    """Accumulate each gradient at once."""

    check_grad_overflow: bool = hint(
        default=True, reason="a gradient that is not finite is always dropped and counted"
    )
    """Skip a step whose gradient is not finite."""


class DataTypesConfig(Section):
    """Types of stored tensors."""

    grad_accum_dtype: DType | None = None
    """Type in which gradients are summed over micro-batches; null means fp32."""

    param_dtype: DType | None = None
    """Must be the type that ``fp16`` or ``bf16`` chooses; it is derived from them."""
