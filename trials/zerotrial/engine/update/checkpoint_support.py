"""Checks whether a checkpoint can store an optimizer's states, after steps and in each save.

:mod:`zerotrial.engine.update.optimizer_states` defines the kinds of states.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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

__all__ = ["SavableStates", "StateErrors", "is_plain", "takes_any_states"]


class SavableStates:
    """Checks of an optimizer's states after steps and in saves.

    After a step only the number of states is compared, which costs next to nothing. All states are
    checked if that number has changed, after a power of two of steps, and in a save.

    Args:
        optimizer: Any optimizer.
        members: Its parameters, each with the index of its group.
        whole: Whether they are full parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Sequence[tuple[int, nn.Parameter]],
        *,
        full_parameters: bool,
    ) -> None:
        self._optimizer = optimizer
        self._known = is_known(optimizer)
        """Whether checkpoints can store all its states, so that nothing needs a check."""
        self._members = () if self._known else members
        self._whole = full_parameters
        self._even = not full_parameters
        """Whether numbers must be equal for all parameters."""
        self._steps = 0
        self._count = 0
        """Number of states at the last full check."""
        self._first: dict[nn.Parameter, frozenset[str]] = {}
        """Names of the states that the first step of a parameter created."""

    def after_step(self) -> None:
        """Check whether the step has created states.

        Raises:
            ConfigError: If it has created a state that no checkpoint can store.
        """
        if self._known:
            return
        self._steps += 1
        state = self._optimizer.state
        count = sum(len(state.get(parameter, ())) for _, parameter in self._members)
        count += len(state) if self._members else 0
        if count != self._count or self._steps & (self._steps - 1) == 0:
            self.record_first_states()
            self.check("optimizer.step()")
            self._count = count

    def replace(
        self, old: nn.Parameter, parts: Sequence[nn.Parameter], members: Sequence[tuple[int, Any]]
    ) -> None:
        """Record that a flat parameter was split; numbers may differ from now on.

        Args:
            old: The parameter that was split.
            parts: Its replacements.
            members: All parameters, each with the index of its group.
        """
        self._members = () if self._known else members
        self._even = False
        if (first := self._first.pop(old, None)) is not None:
            self._first.update(dict.fromkeys(parts, first))

    def record_first_states(self) -> None:
        """Record the states that the first step of each parameter created."""
        for _, parameter in self._members:
            if parameter not in self._first and self._optimizer.state.get(parameter):
                self._first[parameter] = frozenset(self._optimizer.state[parameter])

    def by_element(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the states that a checkpoint stores elementwise, see :func:`tensor_states`."""
        states = tensor_states(self._optimizer, parameter)
        first = self._first.get(parameter)
        return states if first is None else {n: v for n, v in states.items() if n in first}

    def late(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return states of the parameter's shape that its first step did not create."""
        now = self.by_element(parameter)
        states = tensor_states(self._optimizer, parameter)
        return {name: value for name, value in states.items() if name not in now}

    def check(self, call: str, scalars: Mapping[str, float] = MappingProxyType({})) -> None:
        """Check all states.

        Args:
            call: Name of the call for an error.
            scalars: Numbers of all ranks to save, see :func:`read_scalars`.

        Raises:
            ConfigError: If no checkpoint can store one of them.
        """
        refusals = StateErrors(self._optimizer, self._whole, call)
        refusals.check_common(common_states(self._optimizer))
        for _, parameter in self._members:
            state = self._optimizer.state.get(parameter, {})
            refusals.check_one(state, parameter)
            if not self._whole:
                first = self._first.get(parameter, frozenset(state))
                refusals.late(first, state, parameter)
        self.check_numbers(call, scalars)

    def check_numbers(self, call: str, scalars: Mapping[str, float]) -> None:
        """Check only the numbers, see :meth:`check`."""
        refusals = StateErrors(self._optimizer, self._whole, call)
        numbers: dict[int, dict[str, Any]] = defaultdict(dict)
        for group, parameter in self._members if self._even else ():
            state = self._optimizer.state.get(parameter, {})
            saved = {name: scalars.get(f"group{group}.{name}") for name in state}
            numbers[group] |= {name: value for name, value in saved.items() if value is not None}
            refusals.check_number(numbers[group], state, parameter)


def takes_any_states(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it may have arbitrary states: a user's class on full parameters."""
    return not is_known(optimizer) and not is_elementwise(type(optimizer))


@dataclass(frozen=True)
class StateErrors:
    """Errors for states that no checkpoint can store."""

    optimizer: torch.optim.Optimizer
    full_parameters: bool
    """Whether the optimizer gets full parameters."""
    call: str
    """Name of the call for an error."""

    def check_common(self, states: Mapping[Any, Any]) -> None:
        """Reject states under keys that are not parameters and cannot be stored."""
        for key, value in states.items():
            if not self.full_parameters:
                rule = "keep all its states under them, which it steps one after the other"
                raise self._of_parts(rule, f"the key {key!r}")
            shown = f"tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            if not isinstance(key, str | int):
                rule = (
                    "keep its states under its parameters, which are those of its param_groups, or "
                    "under texts and numbers"
                )
                raise self._error(f"must {rule}, got the key {shown}")
            self._plain(shown, value)

    def check_one(self, state: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Reject states that are neither elementwise nor numbers, if they cannot be stored."""
        for name, value in state.items():
            if is_by_element(value, parameter) or is_scalar(value, parameter):
                continue
            if (
                not self.full_parameters and value is not None
            ):  # made again as it was, by the first step
                is_tensor = isinstance(value, Tensor)
                kind = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
                shown = f"{name!r} of {kind} for {tuple(parameter.shape)}"
                raise self._of_parts("keep tensors of their shape and numbers", shown)
            self._plain(repr(name), value)

    def late(
        self, first: frozenset[str], state: Mapping[str, Any], parameter: nn.Parameter
    ) -> None:
        """Reject a tensor that the first step of a flat part did not create."""
        for name, value in state.items():
            if name not in first and is_by_element(value, parameter):
                rule = "make all tensors of their shape in its first step, as a load does"
                raise self._of_parts(rule, f"{name!r} later")

    def check_number(
        self, numbers: dict[str, Any], state: Mapping[str, Any], parameter: nn.Parameter
    ) -> None:
        """Reject a number that differs between flat parts; record this part's."""
        if not parameter.numel():
            return  # this rank has no elements of the group
        for name, value in state.items():
            if not is_scalar(value, parameter):
                continue
            first = float(numbers.setdefault(name, value))
            if not is_same_number(value, first):
                rule = "keep the same numbers for all of them, in the digits of a float"
                raise self._of_parts(rule, f"{name!r} {first} and {plain_number(value)}")

    def _plain(self, shown: str, value: Any) -> None:
        if not is_plain(value):
            rule = (
                "keep tensors, numbers, texts and containers of them, which a checkpoint can hold"
            )
            raise self._error(f"must {rule}, got {shown} of {type(value).__name__}")

    def _of_parts(self, rule: str, got: str) -> ConfigError:
        return self._error(
            "has the attribute elementwise, so that it gets flat parts of parameters, and must "
            f"{rule}, got {got}; without the attribute it gets whole parameters"
        )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(self.call, [f"optimizer: {type(self.optimizer).__name__} {problem}"])


def is_plain(value: Any) -> bool:
    """Return whether a value consists of types that any checkpoint can store."""
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and is_plain(item) for k, item in value.items())
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple} and all(is_plain(item) for item in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)
