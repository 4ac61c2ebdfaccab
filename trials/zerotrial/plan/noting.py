"""Finding the models of a trial without training it, for :mod:`zerotrial.plan.plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import TrialError
from zerotrial.engine.build import planning
from zerotrial.engine.calls.deepspeed import DeepSpeedCalls
from zerotrial.engine.memory import MOMENTS
from zerotrial.engine.module.units import plan_units
from zerotrial.engine.stage3.gather import (
    in_forward_order,
    kept_between_steps,
    kept_to_backward,
)

__all__ = ["Noted", "note_engines"]


@dataclass(frozen=True)
class Noted:
    """An engine that a trial would build."""

    parameters: int
    """Trainable, elements."""
    frozen: int
    """Elements."""
    largest_block: int
    """Elements that stage 3 gathers at once, at most."""
    sizes: tuple[int, ...]
    """Elements of each trainable parameter, in the order of the module."""
    kept_whole: int
    """Elements that stage 3 keeps gathered beyond a block's forward or backward."""
    config: EngineConfig
    optimizer: str
    """A key of :data:`zerotrial.engine.memory.MOMENTS`."""


class _PlannedEngine(DeepSpeedCalls):
    """Stands where an engine would, while a trial's ``__init__`` runs on."""

    optimizer = None  # type: ignore[assignment]

    def __init__(self, module: nn.Module, config: EngineConfig) -> None:
        self.module = module
        self.config = config
        # The sizes of a file for many ranks need not fit one.
        consistent = config.batch_problem(1) is None
        self.batch = config.batch_sizes(1) if consistent else BatchSizes(1, 1, 1, 1)
        self.device = torch.device("cpu")
        self.lr_scheduler = None
        self.global_steps = self.micro_steps = self.skipped_steps = 0

    def train(self, mode: bool = True) -> _PlannedEngine:  # noqa: FBT001, FBT002 - nn.Module's
        self.module.train(mode)
        return self

    def eval(self) -> _PlannedEngine:
        return self.train(mode=False)

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise TrialError("plan: nothing is trained here, so there is nothing to save")

    load_checkpoint = save_checkpoint


def note_engines(build_trial: Callable[[], object]) -> tuple[list[Noted], bool]:
    """Run what builds a trial, and note the engines that it asks for.

    Args:
        build_trial: Calls ``zerotrial.initialize``; first tried with the meta device as default.

    Returns:
        The engines, and whether they were found without giving tensors memory.

    Raises:
        TrialError: If it asks for none.
        Exception: What the user's code raises before it has asked for any.
    """
    noted: list[Noted] = []

    def plan_engine(model: nn.Module, config: EngineConfig, optimizer: Any) -> _PlannedEngine:
        noted.append(_note(model, config, optimizer))
        return _PlannedEngine(model, config)

    with planning(plan_engine):
        try:
            with torch.device("meta"):
                build_trial()
        except Exception:  # noqa: BLE001 - anything may need values; the second try tells
            noted.clear()
        if noted:
            return noted, True
        try:
            build_trial()
        except Exception:
            if not noted:  # what comes after the engines is not needed here
                raise
    if not noted:
        raise TrialError(
            "plan: the trial builds no engine by zerotrial.initialize in its __init__, so there "
            "is no model to plan for"
        )
    return noted, False


def _note(model: nn.Module, config: EngineConfig, optimizer: Any) -> Noted:
    trainable = [p for p in model.parameters() if p.requires_grad]
    units = plan_units(model, leaves=config.zero_optimization.leaf_module.classes)
    numel = sum(p.numel() for p in trainable)
    order = in_forward_order(model, units)
    zero = config.zero_optimization
    kept = kept_to_backward(order, zero) | kept_between_steps(order, zero)
    return Noted(
        parameters=numel,
        frozen=sum(p.numel() for p in model.parameters()) - numel,
        largest_block=max(unit.numel for unit in units),
        sizes=tuple(p.numel() for p in trainable),
        kept_whole=sum(unit.numel for unit in kept),
        config=config,
        optimizer=_kind_of_optimizer(config, optimizer),
    )


def _kind_of_optimizer(config: EngineConfig, given: Any) -> str:
    options: Any = {}
    name = "adam"
    if isinstance(given, torch.optim.Optimizer):
        name, options = type(given).__name__, given.defaults
    elif config.optimizer is not None:
        name, options = config.optimizer.type, config.optimizer.params
    name = name.lower()
    if name == "sgd" and options.get("momentum"):
        return "momentum"
    return name if name in MOMENTS else "adam"
