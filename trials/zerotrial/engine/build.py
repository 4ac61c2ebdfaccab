"""From DeepSpeed's arguments to an engine: chooses its parts by stage, precision and offload."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from os import PathLike
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig, load_engine_config
from zerolab.errors import ConfigError
from zerotrial.engine.comm.all_reducing import without_reduce_scatter
from zerotrial.engine.comm.attendance import Attendance
from zerotrial.engine.comm.connect import connect
from zerotrial.engine.engine import Engine, EngineParts
from zerotrial.engine.flat.stages import Stage0, Stage1, Stage2
from zerotrial.engine.loader import build_loader
from zerotrial.engine.loss_scale import make_scaler
from zerotrial.engine.lr_schedules import SCHEDULES
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.activation import checkpoint_blocks
from zerotrial.engine.module.compiling import compile_blocks
from zerotrial.engine.module.precision import choose_precision, register_input_cast
from zerotrial.engine.module.taken import Taken, release
from zerotrial.engine.seams import (
    NamedParameter,
    OptimizerFactory,
    ParamGroup,
    Stage,
    StageInputs,
)
from zerotrial.engine.update.choose import choose_optimizer
from zerotrial.engine.update.states import check_savable
from zerotrial.engine.watch.step_observer import describe_config, make_observer

__all__ = ["initialize", "planning"]

_FLAT_STAGES = {0: Stage0, 1: Stage1, 2: Stage2}

Planner = Callable[[nn.Module, EngineConfig, Any], Any]
_planner: "ContextVar[Planner | None]" = ContextVar("planner", default=None)


@contextlib.contextmanager
def planning(planner: Planner) -> Iterator[None]:
    """Have :func:`initialize` ask for a stand-in, and build nothing, in this context.

    Args:
        planner: Gets model, configuration and the given optimizer; makes what stands for the
            engine. The model is left as it is.
    """
    token = _planner.set(planner)
    try:
        yield
    finally:
        _planner.reset(token)


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
) -> tuple[Engine, torch.optim.Optimizer, Any, Any]:
    """Build an engine; stands where ``deepspeed.initialize`` stood. **Collective**.

    Args:
        args: An object whose ``deepspeed_config`` names the file, when ``config`` is not given.
        model: The model; its parameters are taken over (flattened, cast) in place.
        optimizer: An instance on the model's parameters, or a callable that makes one from
            parameters; overrides the configuration's.
        model_parameters: What to train, or parameter groups; all that require gradients by default.
        training_data: A dataset; makes the returned loader.
        lr_scheduler: A schedule on ``optimizer``, or a callable that makes one from the engine's.
        distributed_port: Not used; ranks find each other through the environment.
        mpu: Says where the world holds more than data parallelism; see
            :meth:`zerotrial.engine.mesh.Mesh.of`.
        dist_init_required: False: torch.distributed is left alone.
        collate_fn: Of the loader.
        config: File name, mapping, or a configuration that was read already.
        mesh_param: Not supported; pass ``mpu``.
        config_params: Old name of ``config``.
        device: Where to train; the local rank's GPU where there is one, else the CPU.

    Returns:
        Engine, optimizer, training loader or None, schedule or None.

    Raises:
        ConfigError: With all problems of the arguments or the file.
    """
    del distributed_port
    problems = _unusable(optimizer, training_data)
    given = config if config is not None else config_params
    resolved = _read_config(args, model, given, problems)
    assert model is not None
    planner = _planner.get()
    if planner is not None:
        return planner(model, resolved, optimizer), cast("Any", optimizer), None, None
    if mesh_param is not None:
        raise ConfigError("initialize()", ["mesh_param: is not supported; pass mpu"])
    alone = resolved.zero_optimization.stage == 3
    tell = int(os.environ.get("RANK", "0")) == 0
    model_parameters = release(model, optimizer, model_parameters, alone=alone, tell=tell)
    where = _choose_device(device)
    taken = Taken(model)
    mesh = Mesh.of(mpu, _find_world(where, start=dist_init_required), model)
    ranks, rank = mesh.data.size, mesh.data.rank
    batch = resolved.batch_sizes(ranks)
    precision = choose_precision(resolved, batch.accumulation_steps)

    with taken.undone_if_refused():
        model.to(where)
        compile_blocks(model, resolved.compile)
        checkpoint_blocks(model, resolved.activation_checkpointing)
        made = _make_given(optimizer, model_parameters, model)
        inputs = StageInputs(
            module=model,
            groups=_groups_of(model, made, model_parameters),
            config=resolved,
            precision=precision,
            optimizer_factory=_optimizer_factory(resolved, made),
            accumulation_steps=batch.accumulation_steps,
            device=where,
            mesh=mesh,
            taken=taken,
            observer=make_observer(resolved, where, rank),
        )
        stage = _build_stage(inputs)
        taken.closed_by(stage.close)
        if precision.cast_inputs and precision.compute is not None:  # stage 3 casts too: no harm
            register_input_cast(model, precision.compute)
        schedule = _make_schedule(
            resolved, lr_scheduler, stage.optimizer, has_optimizer=made is not None
        )
        loader = None
        if training_data is not None:
            pinned = where.type == "cuda"
            loader = build_loader(
                training_data, resolved, batch, rank, collate_fn, pin_memory=pinned
            )
    engine = Engine(
        EngineParts(
            module=model,
            stage=stage,
            scaler=make_scaler(resolved.fp16),
            lr_scheduler=schedule,
            training_dataloader=loader,
            config=resolved,
            batch=batch,
            device=where,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            mesh=mesh,
            observer=inputs.observer,
            taken=taken,
            attendance=Attendance.of(mesh),
        )
    )
    inputs.observer.attach(engine)
    names = {named.name for group in inputs.groups for named in group.parameters}
    trained = [parameter for name, parameter in model.named_parameters() if name in names]
    taken.hold(trained, engine.close_for_another, alone=alone)
    if rank == 0:
        describe_config(resolved, ranks, model)
    return engine, engine.optimizer, loader, schedule


def _unusable(optimizer: Any, training_data: Any) -> list[str]:
    """What is wrong with two of the arguments."""
    problems = []
    usable = isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)
    if optimizer is not None and not usable:
        problems.append(
            "optimizer: must be a torch Optimizer or a callable that makes one from parameters, "
            f"got {type(optimizer).__name__}"
        )
    kind = type(training_data)
    if training_data is not None and not (
        hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    ):
        problems.append(
            f"training_data: must be a dataset with a length and items, got {kind.__name__}; "
            "iterate over any other yourself"
        )
    return problems


def _read_config(args: Any, model: Any, config: Any, problems: list[str]) -> EngineConfig:
    if not isinstance(model, nn.Module):
        problems.append(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        problems.append("config: is given twice, by args.deepspeed_config and by config; keep one")
    if from_args is None and config is None:
        problems.append("config: is missing; pass a file name or a mapping")
    elif not isinstance(
        config if config is not None else from_args, str | PathLike | Mapping | EngineConfig
    ):
        found = type(config if config is not None else from_args).__name__
        problems.append(f"config: must be a file name or a mapping, got {found}")
    if problems:
        raise ConfigError("initialize()", problems)
    source = config if config is not None else from_args
    if isinstance(source, EngineConfig):
        return source
    assert source is not None
    return load_engine_config(source)


def _choose_device(device: "torch.device | str | None") -> torch.device:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        if not torch.cuda.is_available():
            problem = f"device: must be one that this machine has, got {where}; use cpu"
            raise ConfigError("initialize()", [f"{problem}, or install a CUDA build of torch"])
        if where.index is None:
            local = os.environ.get("LOCAL_RANK")
            # A launcher may have shown each rank its own GPU only.
            index = int(local) % torch.cuda.device_count() if local else torch.cuda.current_device()
            where = torch.device("cuda", index)
        torch.cuda.set_device(where)
    return where


def _find_world(device: torch.device, *, start: bool | None) -> "dist.ProcessGroup | None":
    """All ranks; starts torch.distributed when the environment describes a world."""
    if not dist.is_initialized() and start is not False:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 or start:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend)
    return dist.group.WORLD if dist.is_initialized() else None


def _make_given(
    given: Any, model_parameters: Any, model: nn.Module
) -> torch.optim.Optimizer | None:
    """Turn a callable into an optimizer on the model's own parameters."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    wanted = model_parameters if model_parameters is not None else model.parameters()
    made = given(list(wanted))
    if not isinstance(made, torch.optim.Optimizer):
        msg = f"optimizer: the callable must return a torch Optimizer, got {type(made).__name__}"
        raise ConfigError("initialize()", [msg])
    return made


def _optimizer_factory(
    config: EngineConfig, given: torch.optim.Optimizer | None
) -> OptimizerFactory:
    factory = choose_optimizer(config, given)
    if given is not None:
        check_savable(given, whole=not factory.elementwise)
    return factory


def _groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, model_parameters: Any
) -> list[ParamGroup]:
    """Name the parameters to be trained, group by group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        raw: Sequence[dict[str, Any]] = optimizer.param_groups
    else:
        given: list[Any] = list(names if model_parameters is None else model_parameters)
        raw = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups, seen, problems = [], set(), []
    for index, group in enumerate(raw):
        if "params" not in group:
            known = ", ".join(map(str, group)) or "nothing"
            problems.append(f"parameter group {index}: must have 'params', has {known}")
            continue
        members = group["params"]
        named = []
        for member in [members] if isinstance(members, nn.Parameter) else list(members):
            # torch accepts named parameters too
            parameter = member[1] if isinstance(member, tuple) else member
            if parameter not in names:
                problems.append(f"parameter group {index}: has a parameter that model has not")
            elif parameter in seen:
                problems.append(f"parameter group {index}: has {names[parameter]} a second time")
            elif parameter.requires_grad:
                named.append(NamedParameter(names[parameter], parameter))
            seen.add(parameter)
        options = {k: v for k, v in group.items() if k not in {"params", "param_names"}}
        groups.append(ParamGroup(named, options if optimizer is None else {}))
    if not any(group.parameters for group in groups):
        problems.append("model: no parameter requires a gradient; there is nothing to train")
    if problems:
        raise ConfigError("initialize()", problems)
    return groups


def _build_stage(inputs: StageInputs) -> Stage:
    zero = inputs.config.zero_optimization
    updater = None
    if zero.offload_optimizer.device != "none":
        from zerotrial.engine.update.offload import build_updater

        updater = build_updater
    if zero.stage == 3:
        from zerotrial.engine.stage3.needs import check_torch

        check_torch()
        from zerotrial.engine.stage3.stage import build_stage3

        return build_stage3(inputs)
    comm = connect(inputs.mesh.data.group, inputs.device)
    if not zero.reduce_scatter:
        comm = without_reduce_scatter(comm)
    return _FLAT_STAGES[zero.stage](inputs, comm, updater)


def _make_schedule(
    config: EngineConfig, given: Any, optimizer: torch.optim.Optimizer, *, has_optimizer: bool
) -> Any:
    if given is not None:
        if callable(given) and not hasattr(given, "step"):
            return given(optimizer)
        if not has_optimizer:
            msg = "lr_scheduler: an instance needs its optimizer; pass optimizer= too, or a "
            raise ConfigError("initialize()", [f"{msg}callable that takes the optimizer"])
        return given
    if config.scheduler is None:
        return None
    name, params = config.scheduler.type, config.scheduler.params
    cls: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    try:
        return cls(optimizer, **params)
    except TypeError as problem:
        raise ConfigError(
            config.source, [f"scheduler.params: {name} refuses them: {problem}"]
        ) from problem
