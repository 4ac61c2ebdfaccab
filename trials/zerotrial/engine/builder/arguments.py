"""The arguments of ``initialize``: what is wrong with them, and what they stand for."""

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

__all__ = ["check_values", "groups_of", "make_given", "make_schedule", "read_config", "unusable"]


def unusable(optimizer: Any, training_data: Any) -> list[str]:
    """Say what is wrong with two of the arguments.

    Args:
        optimizer: An instance, a callable or None.
        training_data: A dataset or None.
    """
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
    """Read the configuration from where it is given.

    Args:
        args: An object whose ``deepspeed_config`` names the file, or anything.
        model: To be trained.
        config: File name, mapping, or what was read already.
        problems: Of the other arguments.

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
        found = type(config if config is not None else from_args).__name__
        problems.append(f"config: must be a file name or a mapping, got {found}")
    if problems:
        raise ConfigError("initialize()", problems)
    source = config if config is not None else from_args
    if isinstance(source, EngineConfig):
        return source
    assert source is not None
    return load_engine_config(source)


def check_values(
    model: nn.Module, config: EngineConfig, weights: Any, device: torch.device | str | None
) -> None:
    """Refuse a model without values where nothing would give it any.

    Args:
        model: To be trained.
        config: Of the engine.
        weights: Safetensors to fill it from, or None.
        device: Of the engine; on the meta device nothing has values.

    Raises:
        ConfigError: Names the first parameters that are on the meta device.
    """
    stage = config.zero_optimization.stage
    if stage == 3 and config.tensor_parallel.size == 1:
        return
    where = f"zero_optimization.stage is {stage}"
    if config.tensor_parallel.size > 1:
        where = f"tensor_parallel.size is {config.tensor_parallel.size}"
    problems = []
    if weights is not None:
        problems.append(f"weights: are read at stage 3 of data-parallel ranks, and {where}; ")
        problems[0] += "load them into the model before"
    absent = [name for name, value in model.named_parameters() if value.is_meta]
    if absent and (device is None or torch.device(device).type != "meta"):
        told = ", ".join(first_few(absent))
        problems.append(f"model: must hold values where {where}, got the meta device: {told}; ")
        problems[-1] += "build it on a CPU, or use stage 3, which fills it unit by unit"
    if problems:
        raise ConfigError("initialize()", problems)


def make_given(given: Any, model_parameters: Any, model: nn.Module) -> torch.optim.Optimizer | None:
    """Turn a callable into an optimizer on the model's own parameters.

    Args:
        given: An optimizer, a callable or None.
        model_parameters: What to train; all of the model's by default.
        model: Where they are.

    Raises:
        ConfigError: If the callable makes something else.
    """
    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    wanted = model_parameters if model_parameters is not None else model.parameters()
    made = given(list(wanted))
    if not isinstance(made, torch.optim.Optimizer):
        msg = f"optimizer: the callable must return a torch Optimizer, got {type(made).__name__}"
        raise ConfigError("initialize()", [msg])
    return made


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, model_parameters: Any
) -> list[ParamGroup]:
    """Name the parameters to be trained, group by group.

    Args:
        model: Where they are.
        optimizer: Has groups, when it is given.
        model_parameters: Parameters, or groups of them; else all of the model's.

    Raises:
        ConfigError: With everything that is wrong with the groups.
    """
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
        odd = unsavable({k: v for k, v in options.items() if not is_plain(v)})
        if odd:
            problems.append(f"parameter group {index}: no checkpoint can hold {', '.join(odd)}")
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
    config: EngineConfig, given: Any, optimizer: torch.optim.Optimizer, *, has_optimizer: bool
) -> Any:
    """Make the learning-rate schedule, if there is to be one.

    Args:
        config: May name one.
        given: A schedule, or a callable that makes one from the optimizer.
        optimizer: The engine's.
        has_optimizer: Whether the user gave it, so that a schedule can be on it already.

    Raises:
        ConfigError: If a schedule cannot be on the optimizer, or refuses its arguments.
    """
    if given is not None:
        if callable(given) and not hasattr(given, "step"):
            return given(optimizer)
        if not has_optimizer:
            msg = "lr_scheduler: an instance needs its optimizer; pass optimizer= too, or a "
            raise ConfigError("initialize()", [f"{msg}callable that takes the optimizer"])
        return given
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
