"""Validation and reading of the arguments of ``initialize``."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.reader import load_engine_config
from zerolab.errors import ConfigError
from zerolab.formatting import first_few
from zerotrial.engine.checkpoint.state import unsavable
from zerotrial.engine.lr_schedules import SCHEDULES
from zerotrial.engine.protocols import NamedParameter, ParamGroup
from zerotrial.engine.update.checkpoint_support import is_plain

__all__ = [
    "check_values",
    "groups_of",
    "invalid_arguments",
    "make_schedule",
    "make_user_optimizer",
    "read_config",
    "with_mesh",
]


def invalid_arguments(optimizer: Any, training_data: Any) -> list[str]:
    """Return the problems of two arguments."""
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


def read_config(args: Any, model: Any, config: Any, problems: list[str]) -> EngineConfig:
    """Read the configuration.

    Args:
        args: An object whose ``deepspeed_config`` is a file name, or anything else.
        model: The model.
        config: File name, mapping, or a configuration that was read before.
        problems: Problems of other arguments.

    Raises:
        ConfigError: With all problems of the arguments, or of the file.
    """
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
        kind = type(config if config is not None else from_args).__name__
        problems.append(f"config: must be a file name or a mapping, got {kind}")
    if problems:
        raise ConfigError("initialize()", problems)
    source = config if config is not None else from_args
    if isinstance(source, EngineConfig):
        return source
    assert source is not None
    return load_engine_config(source)


def with_mesh(config: EngineConfig, mesh: Any) -> EngineConfig:
    """Return the configuration with the sequence-parallel size of ``mesh_param``.

    Args:
        config: The configuration.
        mesh: Data- and sequence-parallel sizes; the first follows from the number of ranks.

    Raises:
        ConfigError: If it is no pair of sizes, or contradicts the configuration.
    """
    sizes = tuple(mesh) if isinstance(mesh, Sequence) and not isinstance(mesh, str) else ()
    valid = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    configured = config.sequence_parallel_size
    if not valid or configured not in (1, sizes[1]):
        problem = "mesh_param: must be (data-parallel size, sequence-parallel size)"
        if configured != 1:
            problem += f" with sequence_parallel_size {configured}"
        raise ConfigError("initialize()", [f"{problem}, got {mesh!r}"])
    return config.model_copy(update={"sequence_parallel_size": sizes[1]})


def check_values(
    model: nn.Module, config: EngineConfig, weights: Any, device: torch.device | str | None
) -> None:
    """Raise if parameters of the model have no values and would not get any.

    Args:
        model: The model.
        config: The engine's configuration.
        weights: Safetensors to fill it from, or None.
        device: The engine's device; on the meta device nothing has values.

    Raises:
        ConfigError: Names the first parameters that are on the meta device.
    """
    stage = config.zero_optimization.stage
    if stage == 3 and config.tensor_parallel.size == 1:
        return
    reason = f"zero_optimization.stage is {stage}"
    if config.tensor_parallel.size > 1:
        reason = f"tensor_parallel.size is {config.tensor_parallel.size}"
    problems = []
    if weights is not None:
        problems.append(f"weights: are read at stage 3 of data-parallel ranks, and {reason}; ")
        problems[0] += "load them into the model before"
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing and (device is None or torch.device(device).type != "meta"):
        names = ", ".join(first_few(missing))
        problems.append(f"model: must hold values where {reason}, got the meta device: {names}; ")
        problems[-1] += "build it on a CPU, or use stage 3, which fills it unit by unit"
    if problems:
        raise ConfigError("initialize()", problems)


def make_user_optimizer(
    optimizer: Any, model_parameters: Any, model: nn.Module
) -> torch.optim.Optimizer | None:
    """Return the user's optimizer; call it first if it is a callable.

    Args:
        optimizer: An optimizer, a callable or None.
        model_parameters: Parameters to train; all of the model's by default.
        model: Model that contains them.

    Raises:
        ConfigError: If the callable returns anything else.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    parameters = model_parameters if model_parameters is not None else model.parameters()
    result = optimizer(list(parameters))
    if not isinstance(result, torch.optim.Optimizer):
        msg = f"optimizer: the callable must return a torch Optimizer, got {type(result).__name__}"
        raise ConfigError("initialize()", [msg])
    return result


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, model_parameters: Any
) -> list[ParamGroup]:
    """Return the named parameters to train, by group.

    Args:
        model: Model that contains them.
        optimizer: Optimizer with groups, or None.
        model_parameters: Parameters, or groups of them; all of the model's by default.

    Raises:
        ConfigError: With all problems of the groups.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        raw: Sequence[dict[str, Any]] = optimizer.param_groups
    else:
        members_or_groups: list[Any] = list(names if model_parameters is None else model_parameters)
        raw = (
            members_or_groups
            if members_or_groups and isinstance(members_or_groups[0], dict)
            else [{"params": members_or_groups}]
        )
    groups, seen, problems = [], set(), []
    for index, group in enumerate(raw):
        if "params" not in group:
            keys = ", ".join(map(str, group)) or "nothing"
            problems.append(f"parameter group {index}: must have 'params', has {keys}")
            continue
        members = group["params"]
        named = []
        for member in [members] if isinstance(members, nn.Parameter) else list(members):
            # torch also accepts named parameters
            parameter = member[1] if isinstance(member, tuple) else member
            if parameter not in names:
                problems.append(f"parameter group {index}: has a parameter that model has not")
            elif parameter in seen:
                problems.append(f"parameter group {index}: has {names[parameter]} a second time")
            elif parameter.requires_grad:
                named.append(NamedParameter(names[parameter], parameter))
            seen.add(parameter)
        options = {k: v for k, v in group.items() if k not in {"params", "param_names"}}
        odd = {k: v for k, v in options.items() if not is_plain(v)}
        if odd and (texts := unsavable(odd)):
            problems.append(f"parameter group {index}: no checkpoint can hold {', '.join(texts)}")
        groups.append(ParamGroup(named, options if optimizer is None else {}))
    if not any(group.parameters for group in groups):
        problems.append(
            "model: no parameter requires a gradient; there is nothing to train: for evaluation "
            "leave the optimizer out, of the file too"
        )
    if problems:
        raise ConfigError("initialize()", problems)
    return groups


def make_schedule(
    config: EngineConfig, schedule: Any, optimizer: torch.optim.Optimizer, *, has_optimizer: bool
) -> Any:
    """Return the learning-rate schedule, or None.

    Args:
        config: Configuration that may name one.
        schedule: A schedule, or a callable that makes one from the optimizer.
        optimizer: The engine's optimizer.
        has_optimizer: Whether it is the user's, so that a schedule may refer to it already.

    Raises:
        ConfigError: If the schedule has no optimizer, or rejects its arguments.
    """
    if schedule is not None:
        if callable(schedule) and not hasattr(schedule, "step"):
            return schedule(optimizer)
        if not has_optimizer:
            msg = "lr_scheduler: an instance needs its optimizer; pass optimizer= too, or a "
            raise ConfigError("initialize()", [f"{msg}callable that takes the optimizer"])
        return schedule
    if config.scheduler is None or not optimizer.param_groups:
        return None
    name, params = config.scheduler.type, config.scheduler.params
    cls: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    try:
        return cls(optimizer, **params)
    except TypeError as problem:
        raise ConfigError(
            config.source, [f"scheduler.params: {name} refuses them: {problem}"]
        ) from problem
