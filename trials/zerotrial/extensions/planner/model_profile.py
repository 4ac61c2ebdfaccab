"""Sizes of the models of a trial, found without training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import TrialError
from zerotrial.engine.builder.arguments import groups_of, make_user_optimizer
from zerotrial.engine.builder.build import extended
from zerotrial.engine.builder.environment import is_pipeline, planning
from zerotrial.engine.module.replicated_parameters import choose_replicated
from zerotrial.engine.module.units import plan_units, requested_units
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import ParamGroup
from zerotrial.engine.stage3.prefetch import in_forward_order, kept_to_backward
from zerotrial.extensions.planner.formulas import MOMENTS

__all__ = ["ModelProfile", "profile_model", "profile_trial"]


@dataclass(frozen=True)
class ModelProfile:
    """Sizes of one engine that a trial would build, in elements."""

    parameters: int
    """Trainable parameters."""
    frozen: int
    largest_block: int
    """Largest block that stage 3 gathers at once."""
    sizes: tuple[tuple[int, ...], ...]
    """Elements of each trainable parameter, by optimizer group, in the order of the module."""
    kept_gathered: int
    """Elements that stage 3 keeps gathered from a block's forward to its backward."""
    replicated: int
    """Trainable elements that every rank keeps whole at stage 3, in small parameters."""
    replicated_frozen: int
    """Frozen ones."""
    stages: int
    """Pipeline stages."""
    config: EngineConfig
    optimizer: str
    """A key of :data:`zerotrial.engine.memory.MOMENTS`."""

    @property
    def model_ranks(self) -> int:
        """Ranks that divide one model: pipeline stages x tensor-parallel ranks."""
        return self.stages * self.config.tensor_parallel.size


class _PlannedEngine:
    """Placeholder for an engine while the ``__init__`` of a trial continues."""

    optimizer = None

    def __init__(self, module: nn.Module, config: EngineConfig) -> None:
        self.module = module
        self.config = config
        # The batch sizes of a file for many ranks need not fit one.
        consistent = config.batch_problem(1) is None
        self.batch = config.batch_sizes(1) if consistent else BatchSizes(1, 1, 1, 1)
        self.device = torch.device("cpu")
        self.lr_scheduler = None
        self.progress = Progress(self.batch)

    def train(self, mode: bool = True) -> _PlannedEngine:  # noqa: FBT001, FBT002 - nn.Module's
        self.module.train(mode)
        return self

    def eval(self) -> _PlannedEngine:
        return self.train(mode=False)

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise TrialError("plan: a planned model is not trained; it has no checkpoint to save")

    load_checkpoint = save_checkpoint


def profile_trial(build_trial: Callable[[], object]) -> list[ModelProfile]:
    """Run the ``__init__`` of a trial and profile the engines that it asks for.

    Tensors are on the meta device, without memory. If the code of the trial needs their values, it
    runs again with memory.

    Args:
        build_trial: Builds the trial, which calls ``zerotrial.initialize``.

    Returns:
        One profile per engine.

    Raises:
        TrialError: If the trial builds no engine.
        Exception: An error of the trial's code before it has built an engine.
    """
    profiles: list[ModelProfile] = []

    def plan_engine(
        model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any
    ) -> _PlannedEngine:
        profiles.append(profile_model(model, config, optimizer, model_parameters))
        planned: _PlannedEngine = extended(_PlannedEngine)(model, config)
        return planned

    with planning(plan_engine):
        try:
            with torch.device("meta"):
                build_trial()
        except Exception:  # noqa: BLE001 - any error may be due to the missing values
            profiles.clear()
        if profiles:
            return profiles
        try:
            build_trial()
        except Exception:
            if not profiles:  # errors after the engines are built do not matter here
                raise
    if not profiles:
        raise TrialError(
            "plan: the trial builds no engine by zerotrial.initialize in its __init__, so there "
            "is no model to plan for"
        )
    return profiles


def profile_model(
    model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any
) -> ModelProfile:
    """Measure a model as ``zerotrial.initialize`` would divide it.

    Args:
        model: On any device.
        config: Configuration of the engine.
        optimizer: Optimizer or function, as for ``initialize``.
        model_parameters: Parameters or groups, as for ``initialize``.
    """
    created = make_user_optimizer(optimizer, model_parameters, model)
    groups = groups_of(model, created, model_parameters)
    sizes = _sizes_by_group(model, groups)
    trained = {named.parameter for group in groups for named in group.parameters}
    zero = config.zero_optimization
    replicated = choose_replicated(model, zero)
    units = plan_units(
        model, wrap=requested_units(model), leaves=zero.leaf_module.classes, ignored=replicated
    )
    gathered = kept_to_backward(in_forward_order(model, units), zero)
    numel = sum(map(sum, sizes))
    return ModelProfile(
        parameters=numel,
        frozen=sum(p.numel() for p in model.parameters()) - numel,
        largest_block=max(unit.numel for unit in units),
        sizes=sizes,
        kept_gathered=sum(unit.numel for unit in gathered),
        replicated=sum(p.numel() for p in replicated & trained),
        replicated_frozen=sum(p.numel() for p in replicated - trained),
        stages=model.requested_stages if is_pipeline(model) else 1,
        config=config,
        optimizer=_optimizer_kind(config, created),
    )


def _sizes_by_group(model: nn.Module, groups: Sequence[ParamGroup]) -> tuple[tuple[int, ...], ...]:
    position = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    return tuple(
        tuple(
            named.parameter.numel()
            for named in sorted(group.parameters, key=lambda named: position[named.name])
        )
        for group in groups
    )


def _optimizer_kind(config: EngineConfig, optimizer: torch.optim.Optimizer | None) -> str:
    options: Any = {}
    name = "adam"
    if optimizer is not None:
        name, options = type(optimizer).__name__, optimizer.defaults
    elif config.optimizer is not None:
        name, options = config.optimizer.type, config.optimizer.params
    name = name.lower().removeprefix("deepspeedcpu").removeprefix("fused")
    if name == "sgd" and options.get("momentum"):
        return "momentum"
    return name if name in MOMENTS else "adam"
