"""``initialize``: builds an engine, with parts by stage, precision and offload."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError
from zerolab.registry import PARTS, Registry
from zerotrial.engine.builder.activation_checkpointing import (
    checkpoint_blocks,
    recomputed,
    recomputing,
)
from zerotrial.engine.builder.arguments import (
    check_values,
    groups_of,
    invalid_arguments,
    make_schedule,
    make_user_optimizer,
    read_config,
    with_mesh,
)
from zerotrial.engine.builder.config_log import describe_config, make_observer
from zerotrial.engine.builder.environment import (
    ENV_AUTOTUNE,
    EngineEnvironment,
    choose_device,
    current_planner,
    find_environment,
    find_process_group,
    is_pipeline,
)
from zerotrial.engine.checkpoint.module_loading import accept_full_tensors
from zerotrial.engine.comm.call_record import record_calls, watched_call
from zerotrial.engine.comm.factory import connect
from zerotrial.engine.comm.replicas import broadcast_module
from zerotrial.engine.engine import Engine, EngineParts
from zerotrial.engine.flat.stages import Stage0, Stage1, Stage2
from zerotrial.engine.loss_scale import make_scaler
from zerotrial.engine.memory.heap import garbage_collection_paused
from zerotrial.engine.module.compilation import compile_blocks, unwrap_compiled
from zerotrial.engine.module.ownership import ModelOwnership, close_conflicting_engines
from zerotrial.engine.module.precision import register_input_cast
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.protocols import (
    ENGINE_PARTS,
    Observer,
    OptimizerFactory,
    Stage,
    StageInputs,
    TrainingStage,
)
from zerotrial.engine.update.factory import choose_optimizer
from zerotrial.engine.update.in_memory import build_offloaded

__all__ = ["Initialized", "extended", "initialize"]

logger = logging.getLogger(__name__)

EXTENSIONS: Registry[type] = Registry("zerotrial.engine_extensions", {})
"""Classes by name whose methods are added to the engines of :func:`initialize`."""
_extended: dict[type, Any] = {}


class Initialized(NamedTuple):
    """Result of :func:`initialize`: a tuple, as ``deepspeed.initialize`` returns."""

    engine: Engine
    optimizer: Any
    training_loader: Any
    schedule: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Explain the mistake of a script that uses the tuple as the engine."""
        raise TypeError(f"initialize() {_UNPACK}")

    def __getattr__(self, name: str) -> Any:
        """Explain the mistake of a script that uses the tuple as the engine."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{name}: initialize() {_UNPACK}")


_UNPACK = (
    "returns the engine, the optimizer, the loader and the schedule; unpack them: "
    "`engine, *_ = zerotrial.initialize(...)`"
)

_FLAT_STAGES = {0: Stage0, 1: Stage1, 2: Stage2}


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
) -> Initialized:
    """Build an engine; replaces ``deepspeed.initialize``. **Collective**.

    Args:
        args: An object whose ``deepspeed_config`` is a file name, used without ``config``.
        model: The model; its parameters are taken over (flattened, cast) in place.
        optimizer: An instance on the model's parameters, or a callable that makes one from
            parameters; overrides the configuration's. Without either the engine is for
            evaluation: it computes, saves and loads, without gradients or states.
        model_parameters: Parameters to train, or parameter groups; by default all that require
            gradients.
        training_data: Dataset for the returned loader.
        lr_scheduler: A schedule on ``optimizer``, or a callable that makes one from the
            engine's optimizer.
        distributed_port: Not used; ranks find each other through the environment.
        mpu: Process groups of model parallelism, see :func:`zerotrial.extensions.mpu.mesh_of`.
        dist_init_required: False: do not start torch.distributed.
        collate_fn: Collate function of the loader.
        config: File name, mapping, or a configuration that was read before.
        mesh_param: Data- and sequence-parallel sizes; instead of ``sequence_parallel_size``.
        config_params: Old name of ``config``.
        device: Training device; by default the local rank's GPU if there is one, else the CPU.
        weights: Safetensors, a file or a folder, from which a model is filled unit by unit at
            stage 3; the model may be on the meta device.
        engine_class: Class of the engine; by default chosen by the model.

    Returns:
        Engine, optimizer or None, training loader or None, schedule or None.

    Raises:
        ConfigError: With all problems of the arguments or the file.

    Example:
        >>> config = {
        ...     "train_batch_size": 8,
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        ...     "zero_optimization": {"stage": 2},
        ... }
        >>> model = torch.nn.Linear(4, 1)
        >>> engine, optimizer, loader, schedule = zerotrial.initialize(model=model, config=config)
        >>> for _ in range(3):
        ...     loss = engine(torch.ones(8, 4)).square().mean()
        ...     loss = engine.backward(loss)
        ...     result = engine.step()
        >>> engine.progress.global_steps
        3
    """
    problems = invalid_arguments(optimizer, training_data)
    source = config if config is not None else config_params
    resolved = read_config(args, model, source, problems)
    assert model is not None
    model = unwrap_compiled(model)
    planner = current_planner()
    if planner is not None:
        planned = planner(model, resolved, optimizer, model_parameters)
        return Initialized(planned, optimizer, None, None)
    measured = None
    if ENV_AUTOTUNE in os.environ:
        measured = ENGINE_PARTS["autotune"](model, resolved, optimizer, model_parameters)
        resolved = measured.config
    if mesh_param is not None:
        resolved = with_mesh(resolved, mesh_param)
    stages = model.num_stages if is_pipeline(model) else None
    rules = PARTS.find("torch_versions")
    if rules and (too_old := rules.torch_problems(resolved, torch.__version__, stages)):
        raise ConfigError(resolved.source, too_old)
    check_values(model, resolved, weights, device)
    exclusive = resolved.zero_optimization.stage == 3
    logs = int(os.environ.get("RANK", "0")) == 0
    model_parameters = close_conflicting_engines(
        model, optimizer, model_parameters, exclusive=exclusive, log=logs
    )
    ownership = ModelOwnership(model)
    training_device = choose_device(device)
    world = find_process_group(training_device, start=dist_init_required)
    # With an mpu not all ranks of the world may build this engine.
    with watched_call("initialize") if mpu is None else contextlib.nullcontext():
        environment = find_environment(resolved, model, training_device, mpu, world)
        with ownership.restored_on_error():
            saving = environment.mesh.saving
            observer = make_observer(
                environment.config, environment.device, saving.rank, saving.size
            )
            if measured is not None:
                observer = measured.observe(observer, environment.device)
            divided = _prepare_model(model, environment, observer)
            ownership.set_close(divided.undo)
            user_optimizer = make_user_optimizer(optimizer, model_parameters, model)
            inputs = _stage_inputs(
                model, environment, ownership, user_optimizer, model_parameters, observer
            )
            inputs = replace(inputs, weights=weights)
            stage = _build_stage(inputs)
            ownership.set_close(partial(_undo, stage, divided))
            _cast_inputs(inputs)
            has_optimizer = user_optimizer is not None
            schedule = make_schedule(
                resolved, lr_scheduler, stage.optimizer, has_optimizer=has_optimizer
            )
            loader = _make_loader(training_data, environment, collate_fn, observer)
        engine = _assemble(
            inputs,
            stage,
            divided,
            environment,
            schedule=schedule,
            loader=loader,
            engine_class=engine_class,
        )
    ownership.acquire(_trained(inputs), partial(engine.close, replaced=True), exclusive=exclusive)
    if environment.mesh.saving.rank == 0:
        describe_config(resolved, environment.mesh.replicas, model)
    return Initialized(engine, engine.optimizer if inputs.groups else None, loader, schedule)


def _prepare_model(
    model: nn.Module, environment: EngineEnvironment, observer: Observer
) -> ShardedModel:
    """Move the model to its device; shard, compile and checkpoint it as configured."""
    if is_pipeline(model):
        model.to(environment.device)
        model.prepare(environment.mesh, environment.config.pipeline.activation_checkpoint_interval)
    divided = _shard_model(model, environment, observer)
    if environment.mesh.sequence.size > 1:
        divided.on_undo(ENGINE_PARTS["sequence_parallel"](model, environment.mesh))
    zero = environment.config.zero_optimization
    # Stage 3 moves it unit by unit, and an offloaded optimizer parameter by parameter: a model in
    # fp32 may be larger than the device.
    if zero.stage < 3 and zero.offload_optimizer.device == "none":
        model.to(environment.device)  # after sharding, when only this rank's part is left
    compile_blocks(model, environment.config.compile)
    checkpointing = environment.config.activation_checkpointing
    if is_pipeline(model):
        model.set_recompute(recomputing(checkpointing, divided.sharing))
        divided.on_undo(partial(model.set_recompute, recomputed))
        if (
            checkpointing.active
            and not model.activation_checkpoint_interval
            and environment.mesh.saving.rank == 0
        ):
            logger.warning(
                "activation_checkpointing: has no effect on this PipelineModule; give "
                "pipeline.activation_checkpoint_interval, the number of layers that are computed "
                "again together"
            )
    elif checkpointing.active:
        checkpoint_blocks(model, checkpointing, divided.sharing)
    return divided


def _shard_model(
    model: nn.Module, environment: EngineEnvironment, observer: Observer
) -> ShardedModel:
    """Shard the model over the tensor axis, if there is one. **Collective** in that case."""
    mesh = environment.mesh
    if mesh.tensor.size == 1 or mesh.all_ranks is None:  # with an mpu the user has sharded it
        return ShardedModel.none(model)
    sharded: ShardedModel = ENGINE_PARTS["tensor_parallel"](
        model, environment.config.tensor_parallel, mesh, environment.device, observer.phase
    )
    return sharded


def _undo(stage: TrainingStage, divided: ShardedModel) -> None:
    """Restore the model. **Collective** if it is sharded."""
    stage.close()
    divided.undo()


def _stage_inputs(  # noqa: PLR0917 - one caller
    model: nn.Module,
    environment: EngineEnvironment,
    ownership: ModelOwnership,
    user_optimizer: torch.optim.Optimizer | None,
    model_parameters: Any,
    observer: Observer,
) -> StageInputs:
    trains = user_optimizer is not None or environment.config.optimizer is not None
    return StageInputs(
        module=model,
        groups=groups_of(model, user_optimizer, model_parameters) if trains else [],
        config=environment.config,
        precision=environment.precision,
        optimizer_factory=_optimizer_factory(environment.config, user_optimizer),
        accumulation_steps=environment.batch.accumulation_steps,
        device=environment.device,
        mesh=environment.mesh,
        ownership=ownership,
        observer=observer,
    )


def _cast_inputs(inputs: StageInputs) -> None:
    """Cast the model's inputs; harmless at stage 3, which casts them, too."""
    precision = inputs.precision
    if precision.cast_inputs and precision.compute is not None:
        register_input_cast(inputs.module, precision.compute)


def _make_loader(
    training_data: Any, environment: EngineEnvironment, collate_fn: Any, observer: Observer
) -> Any:
    if training_data is None:
        return None
    pinned = environment.device.type == "cuda"
    rank = environment.mesh.replica
    return ENGINE_PARTS["training_loader"](
        training_data,
        environment.config,
        environment.batch,
        rank,
        collate_fn,
        pin_memory=pinned,
        read_context=partial(observer.phase, "input"),
    )


def _assemble(
    inputs: StageInputs,
    stage: Stage,
    divided: ShardedModel,
    environment: EngineEnvironment,
    *,
    schedule: Any,
    loader: Any,
    engine_class: type[Engine] | None,
) -> Engine:
    """Build the engine from its parts, and attach the observer."""
    engine: Engine = extended(engine_class or _class_for(inputs.module))(
        EngineParts(
            module=inputs.module,
            stage=stage,
            scaler=make_scaler(environment.config.fp16),
            lr_scheduler=schedule,
            training_dataloader=loader,
            config=environment.config,
            batch=environment.batch,
            device=environment.device,
            mesh=environment.mesh,
            divided=divided,
            observer=inputs.observer,
            ownership=inputs.ownership,
            watchdog=record_calls(environment.mesh),
            trains=bool(inputs.groups),
        )
    )
    accept_full_tensors(inputs.module, stage.full_writers(), stage.originals)
    inputs.observer.attach(engine)
    return engine


def extended(engine_class: type) -> Any:
    """Return a class of engines with the methods that extensions add.

    Args:
        engine_class: Class whose own methods are kept.

    Raises:
        ConfigError: If an extension cannot be imported.
    """
    if engine_class not in _extended:
        bases = {base.__name__ for base in engine_class.__mro__}
        mixins = [EXTENSIONS[name] for name in EXTENSIONS]
        added = [
            mixin
            for mixin in mixins
            if not issubclass(engine_class, mixin)
            and getattr(mixin, "engine", engine_class.__name__) in bases
        ]
        content = {"__module__": engine_class.__module__, "__doc__": engine_class.__doc__}
        _extended[engine_class] = (
            type(engine_class.__name__, (engine_class, *added), content) if added else engine_class
        )
    return _extended[engine_class]


def _class_for(model: nn.Module) -> type[Engine]:
    return ENGINE_PARTS["pipeline"] if is_pipeline(model) else Engine


def _trained(inputs: StageInputs) -> list[nn.Parameter]:
    """Return the trained parameters as the stage has left them in the model."""
    names = {named.name for group in inputs.groups for named in group.parameters}
    return [p for name, p in inputs.module.named_parameters() if name in names]


def _optimizer_factory(
    config: EngineConfig, user_optimizer: torch.optim.Optimizer | None
) -> OptimizerFactory:
    factory = choose_optimizer(config, user_optimizer)
    if config.tensor_parallel.size > 1 and not factory.elementwise:
        name = (
            config.optimizer.type
            if user_optimizer is None and config.optimizer
            else type(user_optimizer).__name__
        )
        problem = (
            f"optimizer: must be elementwise where tensor_parallel.size is "
            f"{config.tensor_parallel.size}, as no rank has a whole matrix, got {name}; use AdamW, "
            "or set elementwise = True on an elementwise optimizer of yours"
        )
        raise ConfigError("initialize()", [problem])
    if user_optimizer is not None and "optimizer_probe" in ENGINE_PARTS:
        ENGINE_PARTS["optimizer_probe"](user_optimizer, full_parameters=not factory.elementwise)
    return factory


def _build_stage(inputs: StageInputs) -> Stage:
    zero = inputs.config.zero_optimization
    broadcast_module(inputs.module, inputs.mesh.replicate, inputs.device)
    updater = None if zero.offload_optimizer.device == "none" else build_offloaded
    if zero.stage == 3:
        from zerotrial.engine.stage3.stage import build_stage3

        return build_stage3(inputs)
    comm = connect(inputs.mesh.shard.group, inputs.device)
    if not zero.reduce_scatter:
        comm = ENGINE_PARTS["all_reduce"](comm)
    comm = inputs.observer.timed(comm)
    kind = _FLAT_STAGES[zero.stage] if inputs.groups else Stage0  # nothing to shard otherwise
    return kind(inputs, comm, updater)
