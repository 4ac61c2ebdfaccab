"""States of any torch optimizer: access, creation before the first step, and scalars.

An optimizer keeps, for each parameter, tensors of the parameter's shape (Adam's ``exp_avg``) and
numbers (``step``). A checkpoint stores the former elementwise and the latter once per group. All
other states (factors of SOAP and Shampoo, scales of an 8-bit Adam, a counter of shape (1,), a
number that differs between parameters) are stored unchanged with their parameter, which requires an
optimizer of full parameters. The same applies to a tensor of the parameter's shape that the
parameter's first step did not create: elementwise states must exist before a load, which takes that
step.

Under keys that are not parameters an optimizer may keep states that are equal on all ranks.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "common_states",
    "is_by_element",
    "is_elementwise",
    "is_known",
    "is_same_number",
    "is_scalar",
    "make_states",
    "on_device",
    "other_states",
    "plain_number",
    "read_scalars",
    "set_common_states",
    "set_other_states",
    "split_parameter",
    "tensor_states",
    "tensors_within",
    "uncommon_numbers",
    "write_scalars",
]

_FIRST_VALUES: Mapping[tuple[type[torch.optim.Optimizer], str], float | str] = {
    (torch.optim.Rprop, "step_size"): "lr",
    (torch.optim.ASGD, "eta"): "lr",
    (torch.optim.ASGD, "mu"): 1.0,
    (torch.optim.NAdam, "mu_product"): 1.0,
}
"""Value of a state before the first step: a number, or an option of its group; 0 if not listed.

Adagrad creates its states when it is built.
"""


def tensor_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states that have the parameter's shape, or can be expanded to it.

    Adafactor keeps one number for each row and each column, as ``(rows, 1)`` and ``(1, columns)``.
    """
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_by_element(value, parameter)
    }


def other_states(
    optimizer: torch.optim.Optimizer,
    member: tuple[int, nn.Parameter],
    scalars: Mapping[str, float],
) -> dict[str, Any]:
    """Return states that are neither in :func:`tensor_states` nor equal to a number in ``scalars``.

    Args:
        optimizer: Any optimizer.
        member: One of its parameters, with the index of its group.
        scalars: Numbers from :func:`read_scalars`.
    """
    group, parameter = member
    states = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if is_scalar(value, parameter):
            saved = scalars.get(f"group{group}.{name}")
            if saved is None or not is_same_number(value, saved):
                states[name] = value
        elif not is_by_element(value, parameter):
            states[name] = value
    return states


def common_states(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's states under keys that are not its parameters."""
    members = {p for group in optimizer.param_groups for p in group["params"]}
    if is_known(optimizer) or len(optimizer.state) == sum(p in optimizer.state for p in members):
        return {}
    return {key: value for key, value in optimizer.state.items() if key not in members}


def set_other_states(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, values: Mapping[str, Any]
) -> None:
    """Restore the result of :func:`other_states` on the parameter's device."""
    optimizer.state[parameter].update(
        {name: on_device(value, parameter.device) for name, value in values.items()}
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Copy a state to a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_device(item, device) for item in value)
    return value


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a state, which may be nested in lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(item)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is torch's or ours, so that its states need no check."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "zerotrial."))


def is_elementwise(optimizer_class: type) -> bool:
    """Return whether a class declares that its updates are elementwise.

    A subclass of one of our classes that replaces the update does not inherit the declaration.
    """
    if getattr(optimizer_class, "elementwise", False) is not True:
        return False
    defining_classes = (
        cls for cls in optimizer_class.__mro__ if cls.__module__.startswith("zerotrial.")
    )
    defining_class = next(defining_classes, optimizer_class)
    return "elementwise" in vars(optimizer_class) or _methods(optimizer_class) == _methods(
        defining_class
    )


def _methods(optimizer_class: type) -> list[Any]:
    """Return the functions that update parameters, without torch's hooks around them."""
    functions = [getattr(optimizer_class, name, None) for name in ("step", "update")]
    return [None if function is None else inspect.unwrap(function) for function in functions]


def is_by_element(value: Any, parameter: nn.Parameter) -> bool:
    """Return whether a state has the parameter's shape, or can be expanded to it."""
    if not isinstance(value, Tensor) or is_scalar(value, parameter):
        return False
    same_rank = value.dim() == parameter.dim()
    return same_rank and all(
        size in {1, full_size} for size, full_size in zip(value.shape, parameter.shape, strict=True)
    )


def is_scalar(value: Any, parameter: nn.Parameter) -> bool:
    """Return whether a state is a number, which a checkpoint stores once per group if possible."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and parameter.dim() > 0 and not value.is_complex()
    return isinstance(value, int | float)  # includes bool


def is_same_number(value: Any, number: float) -> bool:
    """Return whether a number is exactly equal to the one in a checkpoint."""
    value = plain_number(value)
    return bool(value == number) or (math.isnan(number) and math.isnan(value))


def plain_number(value: Any) -> Any:
    """Return a number, extracted from a tensor if necessary."""
    return value.item() if isinstance(value, Tensor) else value


def make_states(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Create missing states of parameters, with their values before the first step.

    The optimizer creates them in a step on zeros with a zero gradient, one parameter at a time.
    Parameters keep their values, other parameters are not touched, and neither are the states of
    :func:`common_states`.
    """
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    missing = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    before = copy.deepcopy(common_states(optimizer))
    for parameter in missing:
        value, gradient = parameter.data, parameter.grad
        parameter.data = torch.zeros_like(value)
        parameter.grad = torch.zeros_like(value)
        try:
            type(optimizer).step(optimizer)  # not a schedule's wrapper
        finally:
            parameter.data, parameter.grad = value, gradient
        _rewind(optimizer, parameter, group_of[parameter])
        set_common_states(optimizer, copy.deepcopy(before))


def set_common_states(optimizer: torch.optim.Optimizer, states: Mapping[Any, Any]) -> None:
    """Replace the states of :func:`common_states`."""
    for key in common_states(optimizer):
        del optimizer.state[key]
    optimizer.state.update(states)


def _rewind(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]
) -> None:
    state = optimizer.state[parameter]
    for name, value in state.items():
        first = _FIRST_VALUES.get((type(optimizer), name), 0.0)
        number = float(group[first]) if isinstance(first, str) else first
        if isinstance(value, Tensor):
            value.fill_(number)
        elif is_scalar(value, parameter):
            state[name] = type(value)(number)


def split_parameter(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, cuts: Sequence[int]
) -> list[nn.Parameter]:
    """Split a flat parameter into several, with their parts of its states.

    Args:
        optimizer: An elementwise optimizer.
        parameter: Flat parameter; the new ones are views of it and replace it.
        cuts: First element of the second and each further part, ascending.

    Returns:
        The parts, in order.
    """
    bounds = [0, *cuts, parameter.numel()]
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    parts = [nn.Parameter(parameter.data[span]) for span in spans]
    if state := optimizer.state.pop(parameter, None):
        for part, span in zip(parts, spans, strict=True):
            optimizer.state[part] = {
                name: value[span]
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else copy.deepcopy(value)
                for name, value in state.items()
            }
    for group in optimizer.param_groups:
        group["params"] = [
            part
            for member in group["params"]
            for part in (parts if member is parameter else (member,))
        ]
    return parts


def read_scalars(
    optimizer: torch.optim.Optimizer, members: Sequence[tuple[int, nn.Parameter]]
) -> dict[str, float]:
    """Return the numbers that an optimizer keeps, e.g. ``group0.step``.

    Args:
        optimizer: Any optimizer.
        members: Its parameters, each with the index of its group.
    """
    numbers: dict[str, float] = {}
    for group, parameter in members:
        for name, value in optimizer.state.get(parameter, {}).items():
            if is_scalar(value, parameter):
                numbers.setdefault(f"group{group}.{name}", float(value))
    return numbers


def uncommon_numbers(
    parameters: Iterable[tuple[str, slice]],
    numbers: Iterable[tuple[slice, Mapping[str, float]]],
    group: int,
    scalars: Mapping[str, float],
) -> dict[str, dict[str, float]]:
    """Return the numbers of parameters that differ from those of their group.

    Args:
        parameters: Parameters of a bucket, each with its range in a rank's shard.
        numbers: Result of an updater's ``member_scalars``.
        group: Index of their group.
        scalars: Merged :func:`read_scalars` of all ranks.
    """
    members = [
        (span, {key.partition(".")[2]: number for key, number in own_numbers.items()})
        for span, own_numbers in numbers
    ]
    result = {}
    for name, span in parameters:
        own_numbers = next(
            (n for member_span, n in members if member_span.start <= span.start < member_span.stop),
            {},
        )
        other = {
            key: number
            for key, number in own_numbers.items()
            if not is_same_number(number, scalars.get(f"group{group}.{key}", math.inf))
        }
        if other:
            result[name] = other
    return result


def write_scalars(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[int, nn.Parameter]],
    scalars: Mapping[str, float],
) -> None:
    """Restore the result of :func:`read_scalars`."""
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
