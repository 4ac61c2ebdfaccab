"""How metrics become one number: over batches, and over ranks."""

import copy
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import torch

from zerolab.errors import TrialError
from zerotrial.ranks import Distributed

__all__ = ["MetricReducer", "ReducedMetrics", "Reducer", "ReducerSet", "naming", "reduce_values"]

ReducedMetrics = dict[str, Any]

_PLAIN = (int, float, str, bool, torch.Tensor)


class Reducer(enum.Enum):
    """What happens to a validation metric over all batches of all ranks."""

    AVG = "avg"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


def reduce_values(values: Sequence[float], reducer: Reducer) -> float:
    """Reduce one metric's values, one for each batch of each rank.

    A NaN among them makes the result NaN, whatever the reducer.

    Args:
        values: At least one.
        reducer: How.
    """
    if any(math.isnan(value) for value in values):
        return math.nan
    if reducer is Reducer.MAX:
        return max(values)
    if reducer is Reducer.MIN:
        return min(values)
    infinite = any(math.isinf(value) for value in values)
    total = sum(values) if infinite else math.fsum(values)  # fsum refuses both signs at once
    return total if reducer is Reducer.SUM else total / len(values)


class MetricReducer:
    """A metric that needs more than one number a batch, such as an F1 score.

    Feed it in ``train_batch`` or ``evaluate_batch`` by methods of your own; wrap it once with
    ``context.wrap_reducer``.
    """

    def reset(self) -> None:
        """Forget everything; called before each validation and each reporting period.

        Raises:
            NotImplementedError: If a subclass leaves it out.
        """
        raise NotImplementedError

    def per_slot_reduce(self) -> Any:
        """Reduce what this rank has seen to something that can be pickled.

        Raises:
            NotImplementedError: If a subclass leaves it out.
        """
        raise NotImplementedError

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Reduce the values of all ranks to a number, or to a dict of numbers without a name.

        Raises:
            NotImplementedError: If a subclass leaves it out.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the values since the last report; nothing by default.

        Override it, with :meth:`load_state_dict`, where a restart in between must not lose them.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""


class _FunctionReducer(MetricReducer):
    """Calls a function with the flat list of all values that all ranks ``update``-d."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self.written = getattr(function, "__name__", type(function).__name__)
        """The function's name, for messages."""
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add one value."""
        self._values.append(value)

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> Any:
        return self._values

    def state_dict(self) -> dict[str, Any]:
        plain = all(isinstance(value, _PLAIN) for value in self._values)
        return {"values": list(self._values)} if plain else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values = list(state_dict.get("values", []))

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        missing = object()
        rows = zip_longest(*per_slot_metrics, fillvalue=missing)
        return self._function([value for row in rows for value in row if value is not missing])


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Have an error that the user's code raises say in what it was: which method, of which metric.

    Args:
        what: Ends "raised by ...".
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise


class _Wrapped:
    def __init__(
        self, reducer: MetricReducer, name: str | None, *, training: bool, validation: bool
    ) -> None:
        self.reducer = reducer
        self.name = name
        self.training = training
        self.validation = validation

    @property
    def who(self) -> str:
        """As messages call it."""
        return f"reducer {self.name or self._written!r}"

    @property
    def _written(self) -> str:
        """As the user's code calls it."""
        if isinstance(self.reducer, _FunctionReducer):
            return self.reducer.written
        return type(self.reducer).__name__

    def reset(self) -> None:
        """Forget what this rank has seen."""
        with self._named("reset"):
            self.reducer.reset()

    def begin(self) -> Any:
        """Reduce what this rank has seen."""
        with self._named("per_slot_reduce"):
            return self.reducer.per_slot_reduce()

    def _named(self, method: str) -> AbstractContextManager[None]:
        return naming(f"{method} of {self.who}")

    def finish(self, per_slot: list[Any]) -> ReducedMetrics:
        """Reduce the values of all ranks to metrics."""
        who = self.who
        with self._named("cross_slot_reduce"):
            result = self.reducer.cross_slot_reduce(per_slot)
        if self.name is not None and isinstance(result, Mapping):
            raise TrialError(
                f"{who}: has a name and must give one value, got a dict; drop the name"
            )
        if self.name is None and not isinstance(result, Mapping):
            raise TrialError(
                f"{who}: has no name and must give a dict of metrics, got "
                f"{type(result).__name__}; pass a name to wrap_reducer"
            )
        return dict(result) if self.name is None else {self.name: result}


class ReducerSet:
    """The reducers that a trial has wrapped."""

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None,
        *,
        for_training: bool,
        for_validation: bool,
    ) -> Any:
        """Take up a reducer.

        Returns:
            The reducer; for a function an object with ``update(value)``.

        Raises:
            TrialError: If it is wrapped already, or neither a reducer nor callable.
        """
        if any(reducer is known.reducer for known in self._wrapped):
            raise TrialError("wrap_reducer: this reducer is wrapped already; wrap each one once")
        if isinstance(reducer, MetricReducer):
            ours = reducer
        elif callable(reducer):
            ours = _FunctionReducer(reducer)
        else:
            found = type(reducer).__name__
            raise TrialError(f"wrap_reducer: must get a MetricReducer or a function, got {found}")
        wrapped = _Wrapped(ours, name, training=for_training, validation=for_validation)
        wrapped.reset()
        self._wrapped.append(wrapped)
        return ours

    def active(self, *, training: bool) -> list[_Wrapped]:
        """Those that take part in training, or in validation."""
        return [one for one in self._wrapped if (one.training if training else one.validation)]

    def state_dict(self) -> list[dict[str, Any]]:
        """What to keep of each one, in the order of wrapping."""
        return [one.reducer.state_dict() for one in self._wrapped]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take back what :meth:`state_dict` returned, if as many are wrapped."""
        if len(states) == len(self._wrapped):
            for one, state in zip(self._wrapped, states, strict=True):
                if state:
                    one.reducer.load_state_dict(state)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Begin empty, and leave to training what it had gathered before."""
        shared = [one for one in self._wrapped if one.training and one.validation]
        with _kept(shared):
            self.reset(training=False)
            yield

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Forget what validation gathers meanwhile."""
        with _kept(self.active(training=False)):
            yield

    def reset(self, *, training: bool) -> None:
        """Empty those that take part."""
        for one in self.active(training=training):
            one.reset()

    def reduce(self, distributed: Distributed, *, training: bool) -> ReducedMetrics:
        """Metrics of all that take part, the same on every rank. **Collective** when there are any.

        Raises:
            TrialError: If a reducer gives what it must not.
        """
        active = self.active(training=training)
        if not active:
            return {}
        mine = [one.begin() for one in active]
        per_rank = distributed.allgather(mine, "reducing metrics")
        metrics: ReducedMetrics = {}
        for one, values in zip(active, zip(*per_rank, strict=True), strict=True):
            metrics |= one.finish(list(values))
        return metrics


@contextmanager
def _kept(wrapped: Sequence[_Wrapped]) -> Iterator[None]:
    before = [copy.deepcopy(one.reducer.__dict__) for one in wrapped]
    try:
        yield
    finally:
        for one, attributes in zip(wrapped, before, strict=True):
            one.reducer.__dict__.clear()
            one.reducer.__dict__.update(attributes)
