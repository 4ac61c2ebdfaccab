"""Which optimizers a checkpoint can hold: asked before anything is trained, and in every save.

What there is to hold, and how, is told in :mod:`zerotrial.engine.update.optimizer_states`.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.update.optimizer_states import (
    common_states,
    is_by_element,
    is_elementwise,
    is_known,
    is_same_number,
    is_scalar,
    plain_number,
    tensor_states,
)

__all__ = ["SavableStates", "check_savable", "is_plain", "takes_any_states"]

_PROBE_STEPS = 3
_PROBE_NUMEL = 2**16
"""Elements of the larger parameter that an unknown optimizer is tried on, at most."""

_PROBE_SIDE = 1024
"""A side of it, at most: factors of a side squared, as Shampoo's, then take 4 MB each."""


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
    refusals = _Refusals(optimizer, whole, "initialize()")
    numbers: dict[str, Any] = {}
    for place, (model, shape) in enumerate(_probes(members, whole=whole)):
        probe = nn.Parameter(torch.zeros(shape, dtype=model.dtype))
        slope = torch.linspace(0, place + 1, 0 if whole else probe.numel(), dtype=model.dtype)
        gradient = torch.zeros_like(probe) if whole else slope
        early, states = _states_after_steps(optimizer, model, probe, gradient)
        state = states.pop(probe, {})
        refusals.common(states)
        refusals.of_one(state, probe)
        if not whole:
            refusals.late(early, state, probe)
            refusals.uneven(numbers, state, probe)


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
        self._even = not whole
        """Whether numbers must be the same for all parameters."""
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

    def replace(
        self, old: nn.Parameter, parts: Sequence[nn.Parameter], members: Sequence[tuple[int, Any]]
    ) -> None:
        """Take note that a flat parameter was split; numbers may differ from now on.

        Args:
            old: It was split.
            parts: Take its place.
            members: All parameters, each with the index of its group.
        """
        self._members = () if is_known(self._optimizer) else members
        self._even = False
        if (first := self._first.pop(old, None)) is not None:
            self._first.update(dict.fromkeys(parts, first))

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
        refusals = _Refusals(self._optimizer, self._whole, where)
        refusals.common(common_states(self._optimizer))
        for _, parameter in self._members:
            state = self._optimizer.state.get(parameter, {})
            refusals.of_one(state, parameter)
            if not self._whole:
                first = self._first.get(parameter, frozenset(state))
                refusals.late(first, state, parameter)
        self.check_numbers(where, scalars)

    def check_numbers(self, where: str, scalars: Mapping[str, float]) -> None:
        """Look at the numbers alone; see :meth:`check`."""
        refusals = _Refusals(self._optimizer, self._whole, where)
        numbers: dict[int, dict[str, Any]] = defaultdict(dict)
        for group, parameter in self._members if self._even else ():
            state = self._optimizer.state.get(parameter, {})
            told = {name: scalars.get(f"group{group}.{name}") for name in state}
            numbers[group] |= {name: value for name, value in told.items() if value is not None}
            refusals.uneven(numbers[group], state, parameter)


def takes_any_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may keep whatever a checkpoint has: a class of the user's, on whole parameters."""
    return not is_known(optimizer) and not is_elementwise(type(optimizer))


@dataclass(frozen=True)
class _Refusals:
    """What no checkpoint could hold of an optimizer's states, each a :class:`ConfigError`."""

    optimizer: torch.optim.Optimizer
    whole: bool
    """Whether it gets whole parameters."""
    where: str
    """The call that an error names."""

    def common(self, states: Mapping[Any, Any]) -> None:
        """Refuse what is kept under keys that are no parameters."""
        for key, value in states.items():
            if not self.whole:
                rule = "keep all its states under them, which it steps one after the other"
                raise self._of_parts(rule, f"the key {key!r}")
            told = f"tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            if not isinstance(key, str | int):
                rule = (
                    "keep its states under its parameters, which are those of its param_groups, or "
                    "under texts and numbers"
                )
                raise self._error(f"must {rule}, got the key {told}")
            self._plain(told, value)

    def of_one(self, state: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Refuse what is kept neither by element nor as a number, where it cannot be stored."""
        for name, value in state.items():
            if is_by_element(value, parameter) or is_scalar(value, parameter):
                continue
            if not self.whole and value is not None:  # made again as it was, by the first step
                is_tensor = isinstance(value, Tensor)
                kind = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
                told = f"{name!r} of {kind} for {tuple(parameter.shape)}"
                raise self._of_parts("keep tensors of their shape and numbers", told)
            self._plain(repr(name), value)

    def late(
        self, first: frozenset[str], state: Mapping[str, Any], parameter: nn.Parameter
    ) -> None:
        """Refuse a tensor that a flat part has not had from its first step on."""
        for name, value in state.items():
            if name not in first and is_by_element(value, parameter):
                rule = "make all tensors of their shape in its first step, as a load does"
                raise self._of_parts(rule, f"{name!r} later")

    def uneven(
        self, numbers: dict[str, Any], state: Mapping[str, Any], parameter: nn.Parameter
    ) -> None:
        """Refuse a number that one flat part has and another has not, and note what this has."""
        if not parameter.numel():
            return  # of a rank that has no elements of the group
        for name, value in state.items():
            if not is_scalar(value, parameter):
                continue
            first = float(numbers.setdefault(name, value))
            if not is_same_number(value, first):
                rule = "keep the same numbers for all of them, in the digits of a float"
                raise self._of_parts(rule, f"{name!r} {first} and {plain_number(value)}")

    def _plain(self, told: str, value: Any) -> None:
        if not is_plain(value):
            rule = (
                "keep tensors, numbers, texts and containers of them, which a checkpoint can hold"
            )
            raise self._error(f"must {rule}, got {told} of {type(value).__name__}")

    def _of_parts(self, rule: str, got: str) -> ConfigError:
        return self._error(
            "has the attribute elementwise, so that it gets flat parts of parameters, and must "
            f"{rule}, got {got}; without the attribute it gets whole parameters"
        )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(self.where, [f"optimizer: {type(self.optimizer).__name__} {problem}"])


def is_plain(value: Any) -> bool:
    """Whether a value is made of what any checkpoint holds."""
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and is_plain(item) for k, item in value.items())
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple} and all(is_plain(item) for item in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)


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
