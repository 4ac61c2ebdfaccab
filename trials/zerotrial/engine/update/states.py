"""What any torch optimizer keeps: found, made before its first step, and read as scalars.

An optimizer keeps, for each parameter, tensors of the parameter's shape (Adam's ``exp_avg``) and
numbers (``step``). A checkpoint stores the former by element and the latter once for each group.
Whatever else there is (SOAP's and Shampoo's factors, the scales of an 8-bit Adam, a counter in a
tensor of shape (1,)) has no elements to go by. It is stored as it is, with its parameter, which is
possible where the optimizer sees whole parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError

__all__ = [
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

    A twin of it takes one step on a parameter of its own; torch's optimizers and ours are known.

    Args:
        optimizer: The user's, on the model's parameters, and not stepped yet: the same on all
            ranks, so that all of them refuse it or none.
        whole: Whether it is to get whole parameters.

    Raises:
        ConfigError: If it keeps what can be stored neither by element nor with its parameter.
    """
    kind = type(optimizer)
    members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if kind.__module__.startswith(("torch.optim", "zerotrial.")) or not members:
        return
    model = min(members, key=lambda parameter: parameter.numel())
    probe = nn.Parameter(torch.zeros(model.shape if whole else 8, dtype=model.dtype))
    state = _states_after_a_step(optimizer, model, probe)
    for name, value in state.items():
        if _is_by_element(value, probe) or _is_scalar(value, probe):
            continue
        if not whole and any(True for _ in tensors_within(value)):
            told = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "in a list"
            problem = (
                f"optimizer: {kind.__name__} has the attribute elementwise, so that it gets flat "
                f"parts of parameters, and must keep tensors of their shape, got {name!r} {told} "
                f"for {tuple(probe.shape)}; without the attribute it gets whole parameters"
            )
            raise ConfigError("initialize()", [problem])
        if not is_plain(value):
            problem = (
                f"optimizer: {kind.__name__} must keep tensors, numbers, texts and containers of "
                f"them, which a checkpoint can hold, got {name!r} of {type(value).__name__}"
            )
            raise ConfigError("initialize()", [problem])


def _states_after_a_step(
    optimizer: torch.optim.Optimizer, model: nn.Parameter, probe: nn.Parameter
) -> dict[str, Any]:
    """Step a twin, on ``probe`` in the place of ``model``; the optimizer itself is not touched."""
    twin = copy.copy(optimizer)  # torch's: without the attributes of a user's class, and its hooks
    probes = {id(p): probe for group in optimizer.param_groups for p in group["params"]}
    known = {id(optimizer): twin, **probes}
    group = next(g for g in optimizer.param_groups if any(p is model for p in g["params"]))
    twin.param_groups = [{**copy.deepcopy({**group, "params": []}), "params": [probe]}]
    twin.state = defaultdict(dict)
    probe.grad = torch.zeros_like(probe)
    try:
        for name, value in vars(optimizer).items():
            if name not in vars(twin):
                setattr(twin, name, copy.deepcopy(value, known))
        type(optimizer).step(twin)
    except Exception:  # noqa: BLE001 - whatever it does not like about this; training will show
        return {}
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
