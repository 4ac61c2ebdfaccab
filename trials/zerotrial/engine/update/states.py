"""What any torch optimizer keeps: found, made before its first step, and read as scalars.

An optimizer keeps, for each parameter, tensors of the parameter's shape (Adam's ``exp_avg``) and
numbers (``step``). A checkpoint stores the former by element and the latter once for each group.
Whatever else there is (SOAP's and Shampoo's factors, the scales of an 8-bit Adam, a counter in a
tensor of shape (1,)) has no elements to go by. It is stored as it is, with its parameter, which is
possible where the optimizer sees whole parameters.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError

__all__ = [
    "check_kept",
    "check_savable",
    "is_plain",
    "make_states",
    "other_states",
    "read_scalars",
    "set_other_states",
    "tensor_states",
    "tensors_within",
    "write_scalars",
]

_FIRST_VALUES: Mapping[tuple[type[torch.optim.Optimizer], str], float | str] = {
    (torch.optim.Rprop, "step_size"): "lr",
    (torch.optim.ASGD, "eta"): "lr",
    (torch.optim.ASGD, "mu"): 1.0,
    (torch.optim.NAdam, "mu_product"): 1.0,
}
"""What a state holds before the first step: a number, or an option of its group; 0 if not here.

Adagrad makes its states when it is built, so they never need to be made here.
"""

_PROBE_STEPS = 3
_PROBE_NUMEL = 2**16
"""Elements of the larger parameter that an unknown optimizer is tried on, at most."""

_PROBE_SIDE = 1024
"""A side of it, at most: factors of a side squared, as Shampoo's, then take 4 MB each."""


def tensor_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states that have the parameter's shape, or can be expanded to it.

    Adafactor keeps one number for each row and each column, as ``(rows, 1)`` and ``(1, columns)``.
    """
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if _is_by_element(value, parameter)
    }


def other_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return what is neither a number nor in :func:`tensor_states`."""
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if not _is_by_element(value, parameter) and not _is_scalar(value, parameter)
    }


def set_other_states(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, values: Mapping[str, Any]
) -> None:
    """Restore what :func:`other_states` gave, where the parameter is now."""
    optimizer.state[parameter].update(
        {name: _on_device(value, parameter.device) for name, value in values.items()}
    )


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(item, device) for item in value)
    return value


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Walk the tensors of a state, which may lie in lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(item)


def check_savable(optimizer: torch.optim.Optimizer, *, whole: bool) -> None:
    """Refuse an optimizer whose states no checkpoint could hold, before anything is trained.

    A twin of it takes three steps on a parameter of its own with the shape of the model's smallest,
    and three on one of the largest's, whose sides are cut to at most 1,024 and 65,536 elements (a
    flat part has 8, and as many as the model up to 65,536); torch's optimizers and ours are known.
    What is kept only from a later step on, for a gradient that is not zero, in another group, or
    for another or larger shape stays unseen here: :func:`check_kept` refuses it when it is made.

    Args:
        optimizer: The user's, on the model's parameters, and not stepped yet: the same on all
            ranks, so that all of them refuse it or none.
        whole: Whether it is to get whole parameters.

    Raises:
        ConfigError: If it keeps what can be stored neither by element nor with its parameter.
    """
    members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if _is_known(optimizer) or not members:
        return
    for model, shape in _probes(members, whole=whole):
        probe = nn.Parameter(torch.zeros(shape, dtype=model.dtype))
        state = _states_after_steps(optimizer, model, probe)
        _refuse(optimizer, state, probe, whole=whole, where="initialize()")


def check_kept(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], *, whole: bool
) -> None:
    """Refuse states that no checkpoint could hold, as they are now; see :func:`check_savable`.

    Args:
        optimizer: Any.
        parameters: Those that it has stepped on, as it sees them.
        whole: Whether they are whole parameters.

    Raises:
        ConfigError: If there is one.
    """
    if _is_known(optimizer):
        return
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        _refuse(optimizer, state, parameter, whole=whole, where="optimizer.step()")


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith(("torch.optim", "zerotrial."))


def _probes(
    members: Sequence[nn.Parameter], *, whole: bool
) -> Iterator[tuple[nn.Parameter, Sequence[int]]]:
    """Whose group and type a twin is to step with, and in which shape; the cheapest first."""
    smallest = min(members, key=lambda parameter: parameter.numel())
    largest = max(members, key=lambda parameter: parameter.numel())
    if not whole:
        yield smallest, (8,)
        yield largest, (min(sum(p.numel() for p in members), _PROBE_NUMEL),)
        return
    yield smallest, _bounded(smallest.shape)
    if largest.shape != smallest.shape:
        yield largest, _bounded(largest.shape)


def _bounded(shape: Sequence[int]) -> Sequence[int]:
    """Halve the longest side until a parameter of that shape is cheap to try."""
    sides = list(shape)
    while math.prod(sides) > _PROBE_NUMEL or max(sides, default=0) > _PROBE_SIDE:
        sides[sides.index(max(sides))] //= 2
    return sides


def _refuse(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    parameter: nn.Parameter,
    *,
    whole: bool,
    where: str,
) -> None:
    kind = type(optimizer).__name__
    for name, value in state.items():
        if _is_by_element(value, parameter) or _is_scalar(value, parameter):
            continue
        if not whole and any(True for _ in tensors_within(value)):
            told = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "in a list"
            problem = (
                f"optimizer: {kind} has the attribute elementwise, so that it gets flat "
                f"parts of parameters, and must keep tensors of their shape, got {name!r} {told} "
                f"for {tuple(parameter.shape)}; without the attribute it gets whole parameters"
            )
            raise ConfigError(where, [problem])
        if not is_plain(value):
            problem = (
                f"optimizer: {kind} must keep tensors, numbers, texts and containers of "
                f"them, which a checkpoint can hold, got {name!r} of {type(value).__name__}"
            )
            raise ConfigError(where, [problem])


def _states_after_steps(
    optimizer: torch.optim.Optimizer, model: nn.Parameter, probe: nn.Parameter
) -> dict[str, Any]:
    """Step a twin, on ``probe`` in the place of ``model``; the optimizer itself is not touched."""
    twin = copy.copy(optimizer)  # torch's: without the attributes of a user's class, and its hooks
    probes = {id(p): probe for group in optimizer.param_groups for p in group["params"]}
    known = {id(optimizer): twin, **probes}
    group = next(g for g in optimizer.param_groups if any(p is model for p in g["params"]))
    twin.param_groups = [{**copy.deepcopy({**group, "params": []}), "params": [probe]}]
    twin.state = defaultdict(dict)
    try:
        for name, value in vars(optimizer).items():
            if name not in vars(twin):
                setattr(twin, name, copy.deepcopy(value, known))
        for _ in range(_PROBE_STEPS):
            probe.grad = torch.zeros_like(probe)
            type(optimizer).step(twin)
    except Exception:  # noqa: BLE001, S110 - whatever it does not like; training will show
        pass  # what it has made so far is told all the same
    return dict(twin.state.get(probe, {}))


def is_plain(value: Any) -> bool:
    """Whether a value is made of what any checkpoint holds."""
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and is_plain(item) for k, item in value.items())
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple} and all(is_plain(item) for item in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _is_by_element(value: Any, parameter: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or _is_scalar(value, parameter):
        return False
    same_rank = value.dim() == parameter.dim()
    return same_rank and all(
        mine in {1, whole} for mine, whole in zip(value.shape, parameter.shape, strict=True)
    )


def _is_scalar(value: Any, parameter: nn.Parameter) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and parameter.dim() > 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_states(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the states of parameters that have none, as they are before the first step.

    The optimizer makes them in a step of its own, one parameter at a time, taken on zeros with a
    gradient of zero; parameters keep their values, and other parameters are not touched.
    """
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters:
        if optimizer.state.get(parameter):
            continue
        value, gradient = parameter.data, parameter.grad
        parameter.data = torch.zeros_like(value)
        parameter.grad = torch.zeros_like(value)
        try:
            type(optimizer).step(optimizer)  # not a schedule's wrapper
        finally:
            parameter.data, parameter.grad = value, gradient
        _rewind(optimizer, parameter, group_of[parameter])


def _rewind(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]
) -> None:
    state = optimizer.state[parameter]
    for name, value in state.items():
        first = _FIRST_VALUES.get((type(optimizer), name), 0.0)
        number = float(group[first]) if isinstance(first, str) else first
        if isinstance(value, Tensor):
            value.fill_(number)
        elif _is_scalar(value, parameter):
            state[name] = type(value)(number)


def read_scalars(
    optimizer: torch.optim.Optimizer, members: Sequence[tuple[int, nn.Parameter]]
) -> dict[str, float]:
    """Return the numbers that an optimizer keeps, e.g. ``group0.step``.

    Args:
        optimizer: Any.
        members: Its parameters, each with the index of its group.
    """
    found: dict[str, float] = {}
    for group, parameter in members:
        for name, value in optimizer.state.get(parameter, {}).items():
            if _is_scalar(value, parameter):
                found.setdefault(f"group{group}.{name}", float(value))
    return found


def write_scalars(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[int, nn.Parameter]],
    scalars: Mapping[str, float],
) -> None:
    """Restore what :func:`read_scalars` gave."""
    for group, parameter in members:
        state = optimizer.state[parameter]
        for key, number in scalars.items():
            owner, _, name = key.partition(".")
            if owner != f"group{group}":
                continue
            old = state.get(name)
            if isinstance(old, Tensor):
                old.fill_(number)
            else:
                state[name] = number if old is None else type(old)(number)
