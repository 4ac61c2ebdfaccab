"""Metrics that are reduced from all values of all ranks: ``context.wrap_reducer``."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import torch

from zerolab.errors import TrialError
from zerotrial.ranks import Distributed
from zerotrial.reducers import MetricReducers, ReducedMetrics, error_context

__all__ = ["MetricReducer", "ReducerSet"]

_SERIALIZABLE = (int, float, str, bool, torch.Tensor)


class MetricReducer:
    """Base class of metrics that need more than per-batch averages.

    An F1 score, for example, is computed from the counts of all batches of all ranks. Wrap the
    reducer once with ``context.wrap_reducer``. Add values in ``train_batch`` or ``evaluate_batch``
    through your own methods.

    Example:
        >>> class Accuracy(zerotrial.MetricReducer):
        ...     def reset(self):
        ...         self.correct = self.total = 0
        ...     def update(self, correct, total):
        ...         self.correct += correct
        ...         self.total += total
        ...     def per_slot_reduce(self):
        ...         return self.correct, self.total
        ...     def cross_slot_reduce(self, per_slot_metrics):
        ...         correct, total = map(sum, zip(*per_slot_metrics))
        ...         return correct / total
        >>> accuracy = Accuracy()
        >>> accuracy.reset()
        >>> accuracy.update(correct=3, total=4)
        >>> accuracy.cross_slot_reduce([accuracy.per_slot_reduce(), (1, 4)])
        0.5
    """

    def reset(self) -> None:
        """Drop all values; called before each validation and each reporting period.

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError

    def per_slot_reduce(self) -> Any:
        """Reduce this rank's values to one object that can be pickled.

        Returns:
            Any object, which :meth:`cross_slot_reduce` gets from every rank.

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Reduce the results of all ranks to the metric.

        Args:
            per_slot_metrics: Results of :meth:`per_slot_reduce`, in the order of ranks.

        Returns:
            A number; or a dict of names to numbers if the reducer was wrapped without a name.

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the values since the last report, for a checkpoint.

        Override it together with :meth:`load_state_dict` if a restart must not lose these values.

        Returns:
            Tensors, numbers, strings, and lists and dicts of them. Empty by default.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values that :meth:`state_dict` returned.

        Args:
            state_dict: Saved values.
        """


class _FunctionReducer(MetricReducer):
    """Reducer that calls a function with the flat list of all ranks' values."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self.function_name = getattr(function, "__name__", type(function).__name__)
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
        plain = all(isinstance(value, _SERIALIZABLE) for value in self._values)
        return {"values": list(self._values)} if plain else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values = list(state_dict.get("values", []))

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        padding = object()
        rows = zip_longest(*per_slot_metrics, fillvalue=padding)
        return self._function([value for row in rows for value in row if value is not padding])


class _WrappedReducer:
    def __init__(
        self, reducer: MetricReducer, name: str | None, *, training: bool, validation: bool
    ) -> None:
        self.reducer = reducer
        self.name = name
        self.training = training
        self.validation = validation

    @property
    def label(self) -> str:
        """Name of the reducer in messages."""
        return f"reducer {self.name or self._source_name!r}"

    @property
    def _source_name(self) -> str:
        """Name of the function or class in the user's code."""
        if isinstance(self.reducer, _FunctionReducer):
            return self.reducer.function_name
        return type(self.reducer).__name__

    def reset(self) -> None:
        """Drop this rank's values."""
        with self._error_context("reset"):
            self.reducer.reset()

    def reduce_local(self) -> Any:
        """Reduce this rank's values."""
        with self._error_context("per_slot_reduce"):
            return self.reducer.per_slot_reduce()

    def _error_context(self, method: str) -> AbstractContextManager[None]:
        return error_context(f"{method} of {self.label}")

    def reduce_global(self, per_slot: list[Any]) -> ReducedMetrics:
        """Reduce the results of all ranks to metrics."""
        label = self.label
        with self._error_context("cross_slot_reduce"):
            result = self.reducer.cross_slot_reduce(per_slot)
        if self.name is not None and isinstance(result, Mapping):
            raise TrialError(
                f"{label}: has a name and must give one value, got a dict; drop the name"
            )
        if self.name is None and not isinstance(result, Mapping):
            raise TrialError(
                f"{label}: has no name and must give a dict of metrics, got "
                f"{type(result).__name__}; pass a name to wrap_reducer"
            )
        return dict(result) if self.name is None else {self.name: result}


class ReducerSet(MetricReducers):
    """Collection of the reducers that a trial has wrapped."""

    def __init__(self) -> None:
        self._reducers: list[_WrappedReducer] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None,
        *,
        for_training: bool,
        for_validation: bool,
    ) -> Any:
        """Add a reducer.

        Returns:
            The reducer; for a function, an object with ``update(value)``.

        Raises:
            TrialError: If it is wrapped already, or neither a reducer nor callable.
        """
        if any(reducer is wrapped.reducer for wrapped in self._reducers):
            raise TrialError("wrap_reducer: this reducer is wrapped already; wrap each one once")
        if isinstance(reducer, MetricReducer):
            metric_reducer = reducer
        elif callable(reducer):
            metric_reducer = _FunctionReducer(reducer)
        else:
            type_name = type(reducer).__name__
            raise TrialError(
                f"wrap_reducer: must get a MetricReducer or a function, got {type_name}"
            )
        wrapped = _WrappedReducer(
            metric_reducer, name, training=for_training, validation=for_validation
        )
        wrapped.reset()
        self._reducers.append(wrapped)
        return metric_reducer

    def active(self, *, training: bool) -> list[_WrappedReducer]:
        """Return the reducers of training or of validation."""
        return [
            wrapped
            for wrapped in self._reducers
            if (wrapped.training if training else wrapped.validation)
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each reducer, in the order of wrapping."""
        return [wrapped.reducer.state_dict() for wrapped in self._reducers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of :meth:`state_dict`; ignored if the number of reducers differs."""
        if len(states) == len(self._reducers):
            for wrapped, state in zip(self._reducers, states, strict=True):
                if state:
                    wrapped.reducer.load_state_dict(state)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Reset the reducers of validation for a block, then restore the values of training."""
        shared = [wrapped for wrapped in self._reducers if wrapped.training and wrapped.validation]
        with _restoring_state(shared):
            self.reset(training=False)
            yield

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discard the values that validation adds in a block."""
        with _restoring_state(self.active(training=False)):
            yield

    def reset(self, *, training: bool) -> None:
        """Reset the reducers of training or of validation."""
        for wrapped in self.active(training=training):
            wrapped.reset()

    def reduce(self, distributed: Distributed, *, training: bool) -> ReducedMetrics:
        """Return the metrics of all active reducers, the same on every rank.

        **Collective** if any reducer is active.

        Raises:
            TrialError: If the result of a reducer has the wrong type.
        """
        active = self.active(training=training)
        if not active:
            return {}
        local_values = [wrapped.reduce_local() for wrapped in active]
        per_rank = distributed.allgather(local_values, "reducing metrics")
        metrics: ReducedMetrics = {}
        for wrapped, values in zip(active, zip(*per_rank, strict=True), strict=True):
            metrics |= wrapped.reduce_global(list(values))
        return metrics


@contextmanager
def _restoring_state(reducers: Sequence[_WrappedReducer]) -> Iterator[None]:
    saved = [copy.deepcopy(wrapped.reducer.__dict__) for wrapped in reducers]
    try:
        yield
    finally:
        for wrapped, attributes in zip(reducers, saved, strict=True):
            wrapped.reducer.__dict__.clear()
            wrapped.reducer.__dict__.update(attributes)
