"""What any torch optimizer keeps: found, made before its first step, and read as scalars.

An optimizer keeps, for each parameter, tensors of the parameter's shape (Adam's ``exp_avg``) and
numbers (``step``). A checkpoint stores the former by element and the latter once for each group.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import EngineError

__all__ = ["make_states", "read_scalars", "tensor_states", "write_scalars"]

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

    Raises:
        EngineError: If there is a state of another shape, which has no elements to go by.
    """
    found = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or _is_scalar(value, parameter):
            continue
        if not _expands(value, parameter):
            msg = (
                f"{type(optimizer).__name__}: its state {name!r} has shape {tuple(value.shape)} "
                f"for a parameter of shape {tuple(parameter.shape)}; states of another shape than "
                "the parameter cannot be checkpointed"
            )
            raise EngineError(msg)
        found[name] = value
    return found


def _expands(value: Tensor, parameter: nn.Parameter) -> bool:
    if value.numel() == parameter.numel():
        return True
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
