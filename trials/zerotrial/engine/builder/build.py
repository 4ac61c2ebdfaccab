"""From DeepSpeed's arguments to an engine: chooses its parts by stage, precision and offload."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.torch_versions import torch_problems
from zerolab.errors import ConfigError
from zerotrial.engine.builder.arguments import (
    check_values,
    groups_of,
    make_given,
    make_schedule,
    read_config,
    unusable,
)
from zerotrial.engine.builder.environment import (
    Ground,
    choose_device,
    find_ground,
    find_world,
    is_pipeline,
)
from zerotrial.engine.checkpoint.into_module import accept_full_tensors
from zerotrial.engine.comm.all_reduce import without_reduce_scatter
from zerotrial.engine.comm.factory import connect
from zerotrial.engine.comm.replicas import broadcast_module
from zerotrial.engine.comm.timed_collectives import timed_communicator
from zerotrial.engine.comm.watchdog import CollectiveWatchdog, watched_call
from zerotrial.engine.engine import Engine, EngineParts
from zerotrial.engine.flat.stages import Stage0, Stage1, Stage2
from zerotrial.engine.loader import build_loader
from zerotrial.engine.loss_scale import make_scaler
from zerotrial.engine.memory.heap import garbage_collection_paused
from zerotrial.engine.module.activation import checkpoint_blocks, recomputed, recomputing
from zerotrial.engine.module.compiling import compile_blocks, unwrap_compiled
from zerotrial.engine.module.precision import register_input_cast
from zerotrial.engine.module.taken import Taken, release
from zerotrial.engine.protocols import Observer, OptimizerFactory, Stage, StageInputs
from zerotrial.engine.tensor.model_sharding import Divided, divide
from zerotrial.engine.update.checkpoint_support import check_savable
from zerotrial.engine.update.factory import choose_optimizer
from zerotrial.engine.watch.step_observer import describe_config, make_observer

__all__ = ["initialize", "planning"]

logger = logging.getLogger(__name__)

_FLAT_STAGES = {0: Stage0, 1: Stage1, 2: Stage2}

Planner = Callable[[nn.Module, EngineConfig, Any, Any], Any]
_planner: "ContextVar[Planner | None]" = ContextVar("planner", default=None)


@contextlib.contextmanager
def planning(planner: Planner) -> Iterator[None]:
    """Have :func:`initialize` ask for a stand-in, and build nothing, in this context.

    Args:
        planner: Gets model, configuration, the given optimizer and ``model_parameters``; makes what
            stands for the engine. The model is left as it is.
    """
    token = _planner.set(planner)
    try:
        yield
    finally:
        _planner.reset(token)


@garbage_collection_paused()
def initialize(  # noqa: PLR0917 - DeepSpeed's order
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: "torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None" = None,
    model_parameters: "Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None" = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,  # noqa: FBT001 - DeepSpeed's
    collate_fn: Callable[[Any], Any] | None = None,
    config: "str | PathLike[str] | Mapping[str, Any] | EngineConfig | None" = None,
    mesh_param: Any = None,
    config_params: Any = None,
    device: "torch.device | str | None" = None,
    *,
    weights: str | PathLike[str] | None = None,
    engine_class: type[Engine] | None = None,
) -> tuple[Engine, torch.optim.Optimizer, Any, Any]:
    """Build an engine; stands where ``deepspeed.initialize`` stood. **Collective**.

    Args:
        args: An object whose ``deepspeed_config`` names the file, when ``config`` is not given.
        model: The model; its parameters are taken over (flattened, cast) in place.
        optimizer: An instance on the model's parameters, or a callable that makes one from
            parameters; overrides the configuration's. Where neither has one, the engine is for
            evaluation: it computes, saves and loads, and holds no gradients and no states.
        model_parameters: What to train, or parameter groups; all that require gradients by default.
        training_data: A dataset; makes the returned loader.
        lr_scheduler: A schedule on ``optimizer``, or a callable that makes one from the engine's.
        distributed_port: Not used by ours; ranks find each other through the environment.
        mpu: Says where the world holds more than data parallelism; see
            :meth:`zerotrial.engine.mesh.Mesh.of`.
        dist_init_required: False: torch.distributed is left alone.
        collate_fn: Of the loader.
        config: File name, mapping, or a configuration that was read already.
        mesh_param: Not supported; pass ``mpu``.
        config_params: Old name of ``config``.
        device: Where to train; the local rank's GPU where there is one, else the CPU.
        weights: Safetensors, a file or a folder, that a model is filled from unit by unit at
            stage 3; it may be on the meta device.
        engine_class: Of the engine; None chooses by the model.

    Returns:
        Engine, optimizer or None, training loader or None, schedule or None.

    Raises:
        ConfigError: With all problems of the arguments or the file.
    """
    problems = unusable(optimizer, training_data)
    given = config if config is not None else config_params
    resolved = read_config(args, model, given, problems)
    assert model is not None
    model = unwrap_compiled(model)
    planner = _planner.get()
    if planner is not None:
        return (
            planner(model, resolved, optimizer, model_parameters),
            cast("Any", optimizer),
            None,
            None,
        )
    if mesh_param is not None:
        raise ConfigError("initialize()", ["mesh_param: is not supported; pass mpu"])
    stages = model.num_stages if is_pipeline(model) else None
    too_old = torch_problems(resolved, torch.__version__, stages)
    if too_old:
        raise ConfigError(resolved.source, too_old)
    check_values(model, resolved, weights, device)
    alone = resolved.zero_optimization.stage == 3
    tell = int(os.environ.get("RANK", "0")) == 0
    model_parameters = release(model, optimizer, model_parameters, alone=alone, tell=tell)
    taken = Taken(model)
    where = choose_device(device)
    world = find_world(where, start=dist_init_required)
    # With an mpu the engine may be that of some ranks only.
    with watched_call("initialize") if mpu is None else contextlib.nullcontext():
        ground = find_ground(resolved, model, where, mpu, world)
        with taken.undone_if_refused():
            saving = ground.mesh.saving
            observer = make_observer(ground.config, ground.device, saving.rank, saving.size)
            divided = _prepare_model(model, ground, observer)
            taken.closed_by(divided.undo)
            made = make_given(optimizer, model_parameters, model)
            inputs = _stage_inputs(model, ground, taken, made, model_parameters, observer)
            inputs = replace(inputs, weights=weights)
            stage = _build_stage(inputs)
            taken.closed_by(partial(_undo, stage, divided))
            _cast_inputs(inputs)
            has_optimizer = made is not None
            schedule = make_schedule(
                resolved, lr_scheduler, stage.optimizer, has_optimizer=has_optimizer
            )
            loader = _make_loader(training_data, ground, collate_fn, observer)
        engine = _assemble(
            inputs,
            stage,
            divided,
            ground,
            schedule=schedule,
            loader=loader,
            engine_class=engine_class,
        )
    taken.hold(_trained(inputs), engine.close_for_another, alone=alone)
    if ground.mesh.saving.rank == 0:
        describe_config(resolved, ground.mesh.data.size, model)
    return engine, engine.optimizer if engine.trains else cast("Any", None), loader, schedule


def _prepare_model(model: nn.Module, ground: Ground, observer: Observer) -> Divided:
    """Put the model where it trains; cut, compiled and checkpointed as the file says."""
    if is_pipeline(model):
        model.to(ground.device)
        model.prepare(ground.mesh, ground.config.pipeline.activation_checkpoint_interval)
    divided = divide(
        model, ground.config.tensor_parallel, ground.mesh, ground.device, observer.phase
    )
    if ground.config.zero_optimization.stage < 3:  # which moves it unit by unit
        model.to(ground.device)  # only now, when a rank's part is all there is
    compile_blocks(model, ground.config.compile)
    checkpointing = ground.config.activation_checkpointing
    if is_pipeline(model):
        model.recompute_by(recomputing(checkpointing, divided.sharing))
        divided.on_undo(partial(model.recompute_by, recomputed))
        if (
            checkpointing.active
            and not model.activation_checkpoint_interval
            and ground.mesh.saving.rank == 0
        ):
            logger.warning(
                "activation_checkpointing: has no effect on this PipelineModule; give "
                "pipeline.activation_checkpoint_interval, the number of layers that are computed "
                "again together"
            )
    else:
        checkpoint_blocks(model, checkpointing, divided.sharing)
    return divided


def _undo(stage: Stage, divided: Divided) -> None:
    """Give the model back. **Collective** where it is sharded or cut."""
    stage.close()
    divided.undo()


def _stage_inputs(  # noqa: PLR0917 - one caller
    model: nn.Module,
    ground: Ground,
    taken: Taken,
    made: torch.optim.Optimizer | None,
    model_parameters: Any,
    observer: Observer,
) -> StageInputs:
    trains = made is not None or ground.config.optimizer is not None
    return StageInputs(
        module=model,
        groups=groups_of(model, made, model_parameters) if trains else [],
        config=ground.config,
        precision=ground.precision,
        optimizer_factory=_optimizer_factory(ground.config, made),
        accumulation_steps=ground.batch.accumulation_steps,
        device=ground.device,
        mesh=ground.mesh,
        taken=taken,
        observer=observer,
    )


def _cast_inputs(inputs: StageInputs) -> None:
    """Have what enters the model cast; stage 3 casts too: no harm."""
    precision = inputs.precision
    if precision.cast_inputs and precision.compute is not None:
        register_input_cast(inputs.module, precision.compute)


def _make_loader(training_data: Any, ground: Ground, collate_fn: Any, observer: Observer) -> Any:
    if training_data is None:
        return None
    pinned = ground.device.type == "cuda"
    rank = ground.mesh.data.rank
    return build_loader(
        training_data,
        ground.config,
        ground.batch,
        rank,
        collate_fn,
        pin_memory=pinned,
        reading=partial(observer.phase, "input"),
    )


def _assemble(
    inputs: StageInputs,
    stage: Stage,
    divided: Divided,
    ground: Ground,
    *,
    schedule: Any,
    loader: Any,
    engine_class: type[Engine] | None,
) -> Engine:
    """Put the parts together, and show the engine to its observer."""
    engine = (engine_class or _class_for(inputs.module))(
        EngineParts(
            module=inputs.module,
            stage=stage,
            scaler=make_scaler(ground.config.fp16),
            lr_scheduler=schedule,
            training_dataloader=loader,
            config=ground.config,
            batch=ground.batch,
            device=ground.device,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            mesh=ground.mesh,
            divided=divided,
            observer=inputs.observer,
            taken=inputs.taken,
            watchdog=CollectiveWatchdog.of(ground.mesh),
            trains=bool(inputs.groups),
        )
    )
    accept_full_tensors(inputs.module, stage.full_writers(), stage.originals)
    inputs.observer.attach(engine)
    return engine


def _class_for(model: nn.Module) -> type[Engine]:
    if not is_pipeline(model):
        return Engine
    from zerotrial.engine.pipeline.engine import PipelineEngine

    return PipelineEngine


def _trained(inputs: StageInputs) -> list[nn.Parameter]:
    """The parameters to be trained, as the stage has left them in the model."""
    names = {named.name for group in inputs.groups for named in group.parameters}
    return [p for name, p in inputs.module.named_parameters() if name in names]


def _optimizer_factory(
    config: EngineConfig, given: torch.optim.Optimizer | None
) -> OptimizerFactory:
    factory = choose_optimizer(config, given)
    if config.tensor_parallel.size > 1 and not factory.elementwise:
        name = config.optimizer.type if given is None and config.optimizer else type(given).__name__
        problem = (
            f"optimizer: must update each element by itself where tensor_parallel.size is "
            f"{config.tensor_parallel.size}, as no rank has a whole matrix, got {name}; use AdamW, "
            "or give an optimizer of yours, which does so, the attribute elementwise = True"
        )
        raise ConfigError("initialize()", [problem])
    if given is not None:
        check_savable(given, full_parameters=not factory.elementwise)
    return factory


def _build_stage(inputs: StageInputs) -> Stage:
    zero = inputs.config.zero_optimization
    broadcast_module(inputs.module, inputs.mesh.replicate, inputs.device)
    updater = None
    if zero.offload_optimizer.device != "none":
        from zerotrial.engine.update.offload import build_updater

        updater = build_updater
    if zero.stage == 3:
        from zerotrial.engine.stage3.stage import build_stage3

        return build_stage3(inputs)
    comm = connect(inputs.mesh.shard.group, inputs.device)
    if not zero.reduce_scatter:
        comm = without_reduce_scatter(comm)
    comm = timed_communicator(comm, inputs.observer)
    kind = _FLAT_STAGES[zero.stage] if inputs.groups else Stage0  # only what is updated is sharded
    return kind(inputs, comm, updater)
