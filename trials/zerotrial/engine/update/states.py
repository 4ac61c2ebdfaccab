"""What any torch optimizer keeps: found, made before its first step, and read as scalars.

An optimizer keeps, for each parameter, tensors of the parameter's shape (Adam's ``exp_avg``) and
numbers (``step``). A checkpoint stores the former by element and the latter once for each group.
Whatever else there is (SOAP's and Shampoo's factors, the scales of an 8-bit Adam, a counter in a
tensor of shape (1,), a number that is the parameter's own) has no elements to go by. It is stored
as it is, with its parameter, which is possible where the optimizer sees whole parameters. So is a
tensor of the parameter's shape that the parameter's first step did not make: what a checkpoint has
by element must be there before a load, which takes that step.

Under keys that are no parameters an optimizer may keep what is the same on all ranks.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError

__all__ = [
    "SavableStates",
    "check_savable",
    "common_states",
    "is_known",
    "is_plain",
    "is_scalar",
    "make_states",
    "on_device",
    "other_states",
    "read_scalars",
    "set_common_states",
    "set_other_states",
    "takes_any_states",
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


def other_states(
    optimizer: torch.optim.Optimizer,
    member: tuple[int, nn.Parameter],
    scalars: Mapping[str, float],
) -> dict[str, Any]:
    """Return what is neither in :func:`tensor_states` nor a number that ``scalars`` tells.

    Args:
        optimizer: Any.
        member: One of its parameters, with the index of its group.
        scalars: As :func:`read_scalars` gives them.
    """
    group, parameter = member
    found = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if is_scalar(value, parameter):
            told = scalars.get(f"group{group}.{name}")
            if told is None or not _is_same(value, told):
                found[name] = value
        elif not _is_by_element(value, parameter):
            found[name] = value
    return found


def common_states(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps under keys that are none of its parameters."""
    members = {p for group in optimizer.param_groups for p in group["params"]}
    if is_known(optimizer) or len(optimizer.state) == sum(p in optimizer.state for p in members):
        return {}
    return {key: value for key, value in optimizer.state.items() if key not in members}


def set_other_states(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, values: Mapping[str, Any]
) -> None:
    """Restore what :func:`other_states` gave, where the parameter is now."""
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
    flat part has 8, and as many as the model up to 65,536, and another gradient each: numbers must
    come out alike); torch's optimizers and ours are known. What is kept only from a later step on,
    for other gradients, in another group, or for another or larger shape stays unseen here:
    :class:`SavableStates` refuses it when it is made.

    Args:
        optimizer: The user's, on the model's parameters, and not stepped yet: the same on all
            ranks, so that all of them refuse it or none.
        whole: Whether it is to get whole parameters.

    Raises:
        ConfigError: If it keeps what can be stored neither by element nor with its parameter.
    """
    members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if is_known(optimizer) or not members:
        return
    numbers: dict[str, Any] = {}
    for place, (model, shape) in enumerate(_probes(members, whole=whole)):
        probe = nn.Parameter(torch.zeros(shape, dtype=model.dtype))
        slope = torch.linspace(0, place + 1, 0 if whole else probe.numel(), dtype=model.dtype)
        gradient = torch.zeros_like(probe) if whole else slope
        early, states = _states_after_steps(optimizer, model, probe, gradient)
        state = states.pop(probe, {})
        _refuse_common(optimizer, states, whole=whole, where="initialize()")
        _refuse(optimizer, state, probe, whole=whole, where="initialize()")
        if not whole:
            _refuse_late(optimizer, early, state, probe, where="initialize()")
            _refuse_uneven(optimizer, numbers, state, probe, where="initialize()")


class SavableStates:
    """Refuses what :func:`check_savable` could not foresee: where it is made, and in every save.

    After a step only the number of states is looked at, so that it costs next to nothing. All are
    looked at when there are more or fewer, after as many steps as a power of two, and in a save.

    Args:
        optimizer: Any.
        members: Its parameters as it sees them, each with the index of its group.
        whole: Whether they are whole parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Sequence[tuple[int, nn.Parameter]],
        *,
        whole: bool,
    ) -> None:
        self._optimizer = optimizer
        self._members = () if is_known(optimizer) else members
        self._whole = whole
        self._steps = 0
        self._count = 0
        """How many states there were when all were looked at."""
        self._first: dict[nn.Parameter, frozenset[str]] = {}
        """Which states the first step of a parameter has made."""

    def after_step(self) -> None:
        """Look whether the step has made anything.

        Raises:
            ConfigError: If it has made what no checkpoint could hold.
        """
        self._steps += 1
        state = self._optimizer.state
        count = sum(len(state.get(parameter, ())) for _, parameter in self._members)
        count += len(state) if self._members else 0
        if count != self._count or self._steps & (self._steps - 1) == 0:
            self.note()
            self.check("optimizer.step()")
            self._count = count

    def note(self) -> None:
        """Take note of what the first step of each parameter has made."""
        for _, parameter in self._members:
            if parameter not in self._first and self._optimizer.state.get(parameter):
                self._first[parameter] = frozenset(self._optimizer.state[parameter])

    def by_element(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the states that a checkpoint has by element; see :func:`tensor_states`."""
        found = tensor_states(self._optimizer, parameter)
        first = self._first.get(parameter)
        return found if first is None else {n: v for n, v in found.items() if n in first}

    def late(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return those of the parameter's shape that it has not had from its first step on."""
        now = self.by_element(parameter)
        found = tensor_states(self._optimizer, parameter)
        return {name: value for name, value in found.items() if name not in now}

    def check(self, where: str, scalars: Mapping[str, float] = MappingProxyType({})) -> None:
        """Look at all states.

        Args:
            where: The call that an error is to name.
            scalars: What is to be saved of all ranks' numbers; see :func:`read_scalars`.

        Raises:
            ConfigError: If there is one that no checkpoint could hold.
        """
        common = common_states(self._optimizer)
        _refuse_common(self._optimizer, common, whole=self._whole, where=where)
        for _, parameter in self._members:
            state = self._optimizer.state.get(parameter, {})
            _refuse(self._optimizer, state, parameter, whole=self._whole, where=where)
            if not self._whole:
                first = self._first.get(parameter, frozenset(state))
                _refuse_late(self._optimizer, first, state, parameter, where=where)
        self.check_numbers(where, scalars)

    def check_numbers(self, where: str, scalars: Mapping[str, float]) -> None:
        """Look at the numbers alone; see :meth:`check`."""
        numbers: dict[int, dict[str, Any]] = defaultdict(dict)
        for group, parameter in () if self._whole else self._members:
            state = self._optimizer.state.get(parameter, {})
            told = {name: scalars.get(f"group{group}.{name}") for name in state}
            numbers[group] |= {name: value for name, value in told.items() if value is not None}
            _refuse_uneven(self._optimizer, numbers[group], state, parameter, where=where)


def _refuse_common(
    optimizer: torch.optim.Optimizer, states: Mapping[Any, Any], *, whole: bool, where: str
) -> None:
    """Refuse what is kept under keys that are no parameters, where no checkpoint can hold it."""
    kind = type(optimizer).__name__
    for key, value in states.items():
        if not whole:
            problem = (
                f"optimizer: {kind} has the attribute elementwise, so that it steps flat parts of "
                f"parameters one after the other, and must keep all its states under them, got the "
                f"key {key!r}; without the attribute it gets whole parameters, all in one step"
            )
            raise ConfigError(where, [problem])
        told = f"tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
        if not isinstance(key, str | int):
            problem = (
                f"optimizer: {kind} must keep its states under its parameters, which are those of "
                f"its param_groups, or under texts and numbers, got the key {told}"
            )
            raise ConfigError(where, [problem])
        if not is_plain(value):
            problem = (
                f"optimizer: {kind} must keep tensors, numbers, texts and containers of them, "
                f"which a checkpoint can hold, got {told} of {type(value).__name__}"
            )
            raise ConfigError(where, [problem])


def _refuse_late(
    optimizer: torch.optim.Optimizer,
    first: frozenset[str],
    state: Mapping[str, Any],
    parameter: nn.Parameter,
    *,
    where: str,
) -> None:
    """Refuse a tensor that a flat part has not had from its first step on."""
    for name, value in state.items():
        if name not in first and _is_by_element(value, parameter):
            problem = (
                f"optimizer: {type(optimizer).__name__} has the attribute elementwise, so that it "
                "gets flat parts of parameters, and must make all tensors of their shape in its "
                f"first step, as a load does, got {name!r} later; without the attribute it gets "
                "whole parameters"
            )
            raise ConfigError(where, [problem])


def takes_any_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may keep whatever a checkpoint has: a class of the user's, on whole parameters."""
    return not is_known(optimizer) and not getattr(type(optimizer), "elementwise", False)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's or ours, and its states need not be looked at."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "zerotrial."))


def _refuse_uneven(
    optimizer: torch.optim.Optimizer,
    numbers: dict[str, Any],
    state: Mapping[str, Any],
    parameter: nn.Parameter,
    *,
    where: str,
) -> None:
    """Refuse a number that one flat part has and another has not, and note what this one has."""
    if not parameter.numel():
        return  # of a rank that has no elements of the group
    for name, value in state.items():
        if not is_scalar(value, parameter):
            continue
        first = numbers.setdefault(name, value)
        if not _is_same(value, float(first)):
            problem = (
                f"optimizer: {type(optimizer).__name__} has the attribute elementwise, so that it "
                "gets flat parts of parameters, and must keep the same numbers for all of them, in "
                f"the digits of a float, got {name!r} {float(first)} and {_plain_number(value)}; "
                "without the attribute it gets whole parameters"
            )
            raise ConfigError(where, [problem])


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
        if _is_by_element(value, parameter) or is_scalar(value, parameter):
            continue
        if not whole and value is not None:  # made again as it was, by the first step
            is_tensor = isinstance(value, Tensor)
            told = f"of shape {tuple(value.shape)}" if is_tensor else f"of {type(value).__name__}"
            problem = (
                f"optimizer: {kind} has the attribute elementwise, so that it gets flat parts of "
                f"parameters, and must keep tensors of their shape and numbers, got {name!r} {told}"
                f" for {tuple(parameter.shape)}; without the attribute it gets whole parameters"
            )
            raise ConfigError(where, [problem])
        if not is_plain(value):
            problem = (
                f"optimizer: {kind} must keep tensors, numbers, texts and containers of "
                f"them, which a checkpoint can hold, got {name!r} of {type(value).__name__}"
            )
            raise ConfigError(where, [problem])


def _states_after_steps(
    optimizer: torch.optim.Optimizer, model: nn.Parameter, probe: nn.Parameter, gradient: Tensor
) -> tuple[frozenset[str], dict[Any, Any]]:
    """Step a twin, on ``probe`` in the place of ``model``; the optimizer itself is not touched.

    Returns:
        The names of what ``probe`` has after one step, and the twin's whole state after all.
    """
    twin = copy.copy(optimizer)  # torch's: without the attributes of a user's class, and its hooks
    probes = {id(p): probe for group in optimizer.param_groups for p in group["params"]}
    known = {id(optimizer): twin, **probes}
    group = next(g for g in optimizer.param_groups if any(p is model for p in g["params"]))
    twin.param_groups = [{**copy.deepcopy({**group, "params": []}), "params": [probe]}]
    twin.state = defaultdict(dict)
    first: frozenset[str] | None = None
    try:
        for name, value in vars(optimizer).items():
            if name not in vars(twin):
                setattr(twin, name, copy.deepcopy(value, known))
        for _ in range(_PROBE_STEPS):
            probe.grad = gradient.clone()
            type(optimizer).step(twin)
            first = frozenset(twin.state.get(probe, {})) if first is None else first
    except Exception:  # noqa: BLE001, S110 - whatever it does not like; training will show
        pass  # what it has made so far is told all the same
    found = dict(twin.state)
    return frozenset(found.get(probe, {})) if first is None else first, found


def is_plain(value: Any) -> bool:
    """Whether a value is made of what any checkpoint holds."""
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and is_plain(item) for k, item in value.items())
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple} and all(is_plain(item) for item in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _is_by_element(value: Any, parameter: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or is_scalar(value, parameter):
        return False
    same_rank = value.dim() == parameter.dim()
    return same_rank and all(
        mine in {1, whole} for mine, whole in zip(value.shape, parameter.shape, strict=True)
    )


def is_scalar(value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state is a number, which a checkpoint stores once for each group if it can."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and parameter.dim() > 0 and not value.is_complex()
    return isinstance(value, int | float)  # and so is a bool


def _is_same(value: Any, number: float) -> bool:
    """Whether a number is the one that a checkpoint tells, to the last digit."""
    value = _plain_number(value)
    return bool(value == number) or (math.isnan(number) and math.isnan(value))


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def make_states(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the states of parameters that have none, as they are before the first step.

    The optimizer makes them in a step of its own, one parameter at a time, taken on zeros with a
    gradient of zero; parameters keep their values, and other parameters are not touched. Nor is
    what :func:`common_states` gives.
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
    """Put states in the place of what :func:`common_states` gives."""
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
            if is_scalar(value, parameter):
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
