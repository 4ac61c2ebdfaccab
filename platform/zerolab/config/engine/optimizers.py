"""The ``optimizer`` block: names of optimizers and their parameters."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from zerolab.registry import Registry, subclass_of
from zerolab.schema.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    hint,
    suggest,
    validate,
)

__all__ = [
    "OPTIMIZERS",
    "TORCH_OPTIMIZERS",
    "OptimizerConfig",
    "OptimizerParams",
    "canonical_optimizer",
    "problems_of",
]

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]


class OptimizerConfig(Section):
    """Optimizer that updates the weights."""

    type: str
    """``Adam``, ``AdamW``, ``SGD``, ``Adagrad``, ``Lion``, ``LAMB``, ``Muon``, or a class name of
    ``torch.optim``. As in DeepSpeed, ``Adam`` decouples weight decay unless ``adam_w_mode`` is
    false."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, as given; ``lr``, ``betas``, ``eps``, ``weight_decay``, ..."""

    torch_adam: bool = hint(False, "Adam is always torch's, fused if possible")
    """Use torch's Adam; DeepSpeed reads it in ``params``."""

    legacy_fusion: bool = hint(False, "there is no separate fused optimizer")
    """Use Apex's fused optimizer."""


class OptimizerParams(Section):
    """Arguments of our optimizers."""

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0


class AdamWParams(OptimizerParams):
    """Arguments of AdamW."""

    betas: Betas = Field(default=[0.9, 0.999])
    eps: NonNegativeFloat = 1e-8
    amsgrad: bool = False
    bias_correction: bool = True
    torch_adam: bool = hint(False, "it is always torch's, fused if possible")
    fp32_optimizer_states: bool = hint(True, "optimizer states are fp32")
    adam_w_mode: bool = hint(True, "AdamW always decouples weight decay")


class AdamParams(AdamWParams):
    """Arguments of Adam."""

    adam_w_mode: bool = True


class SgdParams(OptimizerParams):
    """Arguments of SGD."""

    momentum: NonNegativeFloat = 0.0
    dampening: float = 0.0
    nesterov: bool = False


class AdagradParams(OptimizerParams):
    """Arguments of Adagrad."""

    lr_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10


class LionParams(OptimizerParams):
    """Arguments of Lion."""

    betas: Betas = Field(default=[0.9, 0.99])


class LambParams(OptimizerParams):
    """Arguments of LAMB."""

    betas: Betas = Field(default=[0.9, 0.999])
    eps: NonNegativeFloat = 1e-8
    bias_correction: bool = True
    max_coeff: PositiveFloat = 10.0
    min_coeff: NonNegativeFloat = 0.01


class MuonParams(OptimizerParams):
    """Arguments of Muon; AdamW updates parameters that are not matrices."""

    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    ns_method: Literal["gram", "standard"] = hint(
        "standard", "torch.optim.Muon has one Newton-Schulz iteration"
    )
    muon_lr: NonNegativeFloat | None = None
    adam_lr: NonNegativeFloat | None = None
    betas: Betas = Field(default=[0.9, 0.999])
    eps: NonNegativeFloat = 1e-8


class AnyParams(Section):
    """Arguments of an optimizer that describes none: the optimizer checks them itself."""

    model_config = ConfigDict(extra="allow")

    lr: NonNegativeFloat | None = None


OPTIMIZERS: Registry[type[Section]] = Registry(
    "zerotrial.optimizers",
    {
        "Adam": AdamParams,
        "AdamW": AdamWParams,
        "SGD": SgdParams,
        "Adagrad": AdagradParams,
        "Lion": LionParams,
        "LAMB": LambParams,
        "Muon": MuonParams,
    },
    subclass_of(Section, "section", AnyParams),
)
"""Arguments of our optimizers, which are read without torch, and of those of others."""

TORCH_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"}
)
"""Further classes of ``torch.optim``; torch checks their arguments."""

_REFUSED = {
    "OneBitAdam": "compressed communication is not supported; use 'Adam'",
    "ZeroOneAdam": "compressed communication is not supported; use 'Adam'",
    "OneBitLamb": "compressed communication is not supported; use 'LAMB'",
    "MuAdam": "muP learning rates are set in the model's parameter groups; use 'Adam'",
    "MuAdamW": "muP learning rates are set in the model's parameter groups; use 'AdamW'",
    "MuSGD": "muP learning rates are set in the model's parameter groups; use 'SGD'",
    "LBFGS": "it evaluates the model inside its step; use 'AdamW'",
    "SparseAdam": "gradients are dense here; use 'Adam'",
}


def canonical_optimizer(name: str) -> str:
    """Return the usual spelling of an optimizer's name."""
    spellings = {key.lower(): key for key in (*OPTIMIZERS, *TORCH_OPTIMIZERS, *_REFUSED)}
    return spellings.get(name.lower(), name)


def problems_of(config: OptimizerConfig) -> list[str]:
    """Return the problems of the block, one line each."""
    name = canonical_optimizer(config.type)
    if name in _REFUSED:
        return [f"optimizer.type: {_REFUSED[name]}, got {config.type!r}"]
    problem = OPTIMIZERS.problem(name)
    if problem is not None:
        return [f"optimizer.type: {problem}"]
    if name in OPTIMIZERS:
        return _param_problems(name, config.params)
    if name in TORCH_OPTIMIZERS:
        return torch_problems("optimizer", config.params)
    names = [*OPTIMIZERS, *sorted(TORCH_OPTIMIZERS)]
    hint = suggest(config.type, names)
    return [f"optimizer.type: must be one of {', '.join(names)}, got {config.type!r}{hint}"]


def _param_problems(name: str, params: Mapping[str, Any]) -> list[str]:
    range_problems = []
    if "max_grad_norm" in params:
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
        range_problems.append(
            "optimizer.params.max_grad_norm: is not an optimizer's parameter; "
            "set gradient_clipping at the top of the file"
        )
    _, problems, _ = validate(OPTIMIZERS[name], params)
    return range_problems + [f"optimizer.params.{problem}" for problem in problems]


def torch_problems(block: str, params: Mapping[str, Any]) -> list[str]:
    """Check the arguments of a torch class without importing torch."""
    problems = []
    lr = params.get("lr")
    is_number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (is_number and math.isfinite(lr) and lr >= 0):
        problems.append(f"{block}.params.lr: must be a number that is not negative, got {lr!r}")
    return problems
