"""Finding the models of a trial without training it, for :mod:`zerotrial.plan.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import TrialError
from zerotrial.engine.build import planning
from zerotrial.engine.building.arguments import groups_of, make_given
from zerotrial.engine.calls.deepspeed import DeepSpeedCalls
from zerotrial.engine.memory import MOMENTS
from zerotrial.engine.module.units import Unit, asked_units, find_blocks, plan_units
from zerotrial.engine.pipeline.module import PipelineModule, built_whole
from zerotrial.engine.seams import ParamGroup
from zerotrial.engine.stage3.gather import (
    in_forward_order,
    kept_between_steps,
    kept_to_backward,
)
from zerotrial.engine.tensor.plan import find_layers

__all__ = ["Kept", "Noted", "note_engines"]


@dataclass(frozen=True)
class Kept:
    """What stage 3 does not gather twice for each micro-batch, or gathers and never reduces."""

    to_backward: int = 0
    """Elements that stay gathered from forward to backward; the root's are among them."""

    between_steps: int = 0
    """Elements that stay gathered until the update."""

    frozen: int = 0
    """Elements that are gathered, and have no gradient."""

    def scaled(self, factor: float) -> Kept:
        """As much of a part of the model."""
        return Kept(
            round(self.to_backward * factor),
            round(self.between_steps * factor),
            round(self.frozen * factor),
        )


@dataclass(frozen=True)
class Noted:
    """An engine that a trial would build."""

    parameters: int
    """Trainable, elements."""
    frozen: int
    """Elements."""
    largest_block: int
    """Elements that stage 3 gathers at once, at most."""
    sizes: tuple[tuple[int, ...], ...]
    """Elements of each trainable parameter, by optimizer group, in the order of the module."""
    kept_whole: int
    """Elements that stage 3 keeps gathered beyond a block's forward or backward."""
    kept: Kept
    """How often stage 3 gathers what."""
    blocks: int
    """Repeated blocks, between which a model can be divided into pipeline stages."""
    in_blocks: int
    """Trainable elements in them."""
    cut: int
    """Trainable elements that a plan of tensor parallelism cuts; without one, those of matrices in
    blocks."""
    hidden: int
    """Features of the activation between two blocks, as far as the blocks' matrices tell."""
    sequence_parallel: bool
    """Whether the plan of tensor parallelism cuts norms along the tokens."""
    is_pipeline: bool
    """Whether the model is a ``PipelineModule``; :attr:`interval` says what it computes again."""
    interval: int
    """Layers that a pipeline computes again together; 0 keeps all activations."""
    chunks: int
    """On each rank of a pipeline."""
    stages: int
    """Pipeline stages that the trial asks for."""
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

    def plan_engine(
        model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any
    ) -> _PlannedEngine:
        noted.append(_note(model, config, optimizer, model_parameters))
        return _PlannedEngine(model, config)

    with planning(plan_engine), built_whole():
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


def _note(model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any) -> Noted:
    made = make_given(optimizer, model_parameters, model)
    sizes = _sizes_by_group(model, groups_of(model, made, model_parameters))
    leaves = config.zero_optimization.leaf_module.classes
    units = plan_units(model, wrap=asked_units(model), leaves=leaves)
    numel = sum(map(sum, sizes))
    order = in_forward_order(model, units)
    zero = config.zero_optimization
    blocks = _find_repeated(model)
    linear = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    whole = kept_between_steps(order, zero)
    later = kept_to_backward(order, zero) - whole
    held = (later | {order[0]}) - whole
    frozen = sum(p.numel() for p in model.parameters()) - numel
    return Noted(
        parameters=numel,
        frozen=frozen,
        largest_block=max(unit.numel for unit in units),
        sizes=sizes,
        kept_whole=_elements(later | whole),
        kept=Kept(_elements(held), _elements(whole), frozen),
        blocks=len(blocks),
        in_blocks=_trained({p for block in blocks for p in block.parameters()}),
        cut=_cut(model, config, linear),
        sequence_parallel=_cuts_tokens(model, config),
        hidden=_most_common([layer.in_features for layer in linear]),
        is_pipeline=isinstance(model, PipelineModule),
        interval=config.pipeline.activation_checkpoint_interval
        or getattr(model, "activation_checkpoint_interval", 0),
        chunks=_chunks(model, config),
        stages=model.asked_stages if isinstance(model, PipelineModule) else 1,
        config=config,
        optimizer=_kind_of_optimizer(config, made),
    )


def _find_repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model; of a pipeline those layers of which there are several alike."""
    if not isinstance(model, PipelineModule):
        return [block for _, block in find_blocks(model)]
    layers = [layer for layer in model.layers.values() if _trained(layer.parameters())]
    kinds = [type(layer) for layer in layers]
    return [layer for layer in layers if kinds.count(type(layer)) > 1] or layers


def _chunks(model: nn.Module, config: EngineConfig) -> int:
    """As the pipeline is built; interleaved needs two at least."""
    if isinstance(model, PipelineModule):
        return model.asked_chunks
    return 2 if config.pipeline.schedule == "interleaved" else 1


def _elements(units: Iterable[Unit]) -> int:
    return sum(unit.numel for unit in units)


def _sizes_by_group(model: nn.Module, groups: Sequence[ParamGroup]) -> tuple[tuple[int, ...], ...]:
    place = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    found = []
    for group in groups:
        members = sorted(group.parameters, key=lambda named: place[named.name])
        found.append(tuple(named.parameter.numel() for named in members))
    return tuple(found)


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


def _most_common(sizes: list[int]) -> int:
    return max(sizes, key=lambda size: (sizes.count(size), -size), default=0)


def _cut(model: nn.Module, config: EngineConfig, linear: list[nn.Linear]) -> int:
    layers, problems = find_layers(model, config.tensor_parallel)
    planned = [layer.module for layer in layers if layer.plan.style in ("colwise", "rowwise")]
    modules: Iterable[nn.Module] = linear if problems else planned
    return _trained({module.weight for module in modules})  # type: ignore[misc]


def _cuts_tokens(model: nn.Module, config: EngineConfig) -> bool:
    layers, problems = find_layers(model, config.tensor_parallel)
    return not problems and any(layer.plan.style == "sequence" for layer in layers)


def _kind_of_optimizer(config: EngineConfig, given: torch.optim.Optimizer | None) -> str:
    options: Any = {}
    name = "adam"
    if given is not None:
        name, options = type(given).__name__, given.defaults
    elif config.optimizer is not None:
        name, options = config.optimizer.type, config.optimizer.params
    name = name.lower().removeprefix("deepspeedcpu").removeprefix("fused")
    if name == "sgd" and options.get("momentum"):
        return "momentum"
    return name if name in MOMENTS else "adam"
