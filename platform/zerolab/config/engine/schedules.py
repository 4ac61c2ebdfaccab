"""The ``scheduler`` block: learning-rate schedules and their parameters."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zerolab.registry import Registry, subclass_of
from zerolab.schema.section import (
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    suggest,
    validate,
)

__all__ = ["SCHEDULES", "TORCH_SCHEDULES", "SchedulerConfig", "canonical_schedule", "problems_of"]


class SchedulerConfig(Section):
    """Learning-rate schedule; it advances once for each applied optimizer step."""

    type: str
    """``WarmupLR``, ``WarmupDecayLR``, ``WarmupCosineLR``, ``OneCycle``, ``LRRangeTest`` with
    DeepSpeed's values, ``LinearWarmupLR`` (a warm-up without a step at 0), or a class name of
    ``torch.optim.lr_scheduler``."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, as given."""


def _rates(value: Any) -> Any:
    values = value if isinstance(value, list) and value else [value]
    for rate in values:
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not math.isfinite(rate) or rate < 0:
            text = f"must be a number that is not negative, or one for each group, got {value!r}"
            raise ValueError(text)
    return value


Rate = Annotated[Any, AfterValidator(_rates)]
"""A rate, or a list with one for each parameter group."""


def _rates_or_none(value: Any) -> Any:
    return value if value is None else _rates(value)


WarmupType = Literal["log", "linear"]


class WarmupParams(Section):
    """Arguments of WarmupLR."""

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Annotated[Any, AfterValidator(_rates_or_none)] = None
    warmup_num_steps: NonNegativeInt = 1000
    """The minimum is 2, as in DeepSpeed: Hugging Face writes 0 for no warm-up."""
    warmup_type: WarmupType = "log"
    last_batch_iteration: Int = -1


class LinearWarmupParams(Section):
    """Arguments of LinearWarmupLR; its warm-up is always linear."""

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Annotated[Any, AfterValidator(_rates_or_none)] = None
    warmup_num_steps: PositiveInt = 1000
    last_batch_iteration: Int = -1


class WarmupDecayParams(Section):
    """Arguments of WarmupDecayLR."""

    total_num_steps: PositiveInt
    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate = 0.001
    warmup_num_steps: NonNegativeInt = 1000
    warmup_type: WarmupType = "log"
    last_batch_iteration: Int = -1


class WarmupCosineParams(Section):
    """Arguments of WarmupCosineLR."""

    total_num_steps: PositiveInt
    warmup_min_ratio: NonNegativeFloat = 0.0
    warmup_num_steps: NonNegativeInt = 1000
    cos_min_ratio: NonNegativeFloat = 1e-4
    warmup_type: WarmupType = "log"
    last_batch_iteration: Int = -1


class OneCycleParams(Section):
    """Arguments of OneCycle."""

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: NonNegativeFloat = 0.0
    cycle_first_step_size: PositiveInt = 2000
    cycle_second_step_size: PositiveInt | None = None
    cycle_first_stair_count: NonNegativeInt = 0
    cycle_second_stair_count: NonNegativeInt | None = None
    decay_step_size: NonNegativeInt = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rate = 0.8
    cycle_max_mom: Rate = 0.9
    decay_mom_rate: NonNegativeFloat = 0.0
    last_batch_iteration: Int = -1


class LRRangeTestParams(Section):
    """Arguments of LRRangeTest."""

    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: PositiveFloat = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: Int = -1


SCHEDULES: Registry[type[Section]] = Registry(
    "zerotrial.lr_schedules",
    {
        "WarmupLR": WarmupParams,
        "WarmupDecayLR": WarmupDecayParams,
        "WarmupCosineLR": WarmupCosineParams,
        "OneCycle": OneCycleParams,
        "LRRangeTest": LRRangeTestParams,
        "LinearWarmupLR": LinearWarmupParams,
    },
    subclass_of(Section, "section"),
)
"""Arguments of the schedules of the core, which are read without torch, and of extensions."""

TORCH_SCHEDULES = frozenset(
    {
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "ReduceLROnPlateau",
        "StepLR",
    }
)
"""Classes of ``torch.optim.lr_scheduler``; torch checks their arguments."""

_REFUSED = {
    "LambdaLR": "a function cannot be JSON; pass lr_scheduler to initialize()",
    "MultiplicativeLR": "a function cannot be JSON; pass lr_scheduler to initialize()",
    "ChainedScheduler": "schedules cannot be JSON; pass lr_scheduler to initialize()",
    "SequentialLR": "schedules cannot be JSON; pass lr_scheduler to initialize()",
}


def canonical_schedule(name: str) -> str:
    """Return the usual spelling of a schedule's name."""
    spellings = {key.lower(): key for key in (*SCHEDULES, *TORCH_SCHEDULES, *_REFUSED)}
    return spellings.get(name.lower(), name)


def problems_of(config: SchedulerConfig) -> list[str]:
    """Return the problems of the block, one line each."""
    name = canonical_schedule(config.type)
    if name in _REFUSED:
        return [f"scheduler.type: {_REFUSED[name]}, got {config.type!r}"]
    problem = SCHEDULES.problem(name)
    if problem is not None:
        return [f"scheduler.type: {problem}"]
    if name in SCHEDULES:
        _, problems, _ = validate(SCHEDULES[name], config.params)
        return [f"scheduler.params.{problem}" for problem in problems]
    if name in TORCH_SCHEDULES:
        return []
    names = [*SCHEDULES, *sorted(TORCH_SCHEDULES)]
    hint = suggest(config.type, names)
    return [f"scheduler.type: must be one of {', '.join(names)}, got {config.type!r}{hint}"]
