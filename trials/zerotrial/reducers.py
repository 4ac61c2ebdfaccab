"""Reduction of metrics over batches and ranks."""

import enum
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from zerotrial.ranks import Distributed

__all__ = [
    "MetricReducers",
    "ReducedMetrics",
    "Reducer",
    "error_context",
    "reduce_values",
]

ReducedMetrics = dict[str, Any]


class Reducer(enum.Enum):
    """Reduction of a validation metric over all batches of all ranks.

    Example:
        >>> class MyTrial(zerotrial.ZeroTrial):
        ...     def evaluation_reducer(self):
        ...         return {"loss": zerotrial.Reducer.AVG, "errors": zerotrial.Reducer.SUM}
    """

    AVG = "avg"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


def reduce_values(values: Sequence[float], reducer: Reducer) -> float:
    """Reduce one metric's values, one for each batch of each rank.

    If any value is NaN, the result is NaN with every reducer.

    Args:
        values: At least one value.
        reducer: Reduction to apply.

    Example:
        >>> reduce_values([1.0, 3.0], Reducer.AVG)
        2.0
    """
    if any(math.isnan(value) for value in values):
        return math.nan
    if reducer is Reducer.MAX:
        return max(values)
    if reducer is Reducer.MIN:
        return min(values)
    infinite = any(math.isinf(value) for value in values)
    total = sum(values) if infinite else math.fsum(values)  # fsum raises for inf - inf
    return total if reducer is Reducer.SUM else total / len(values)


@contextmanager
def error_context(label: str) -> Iterator[None]:
    """Add a note with the method and the metric to errors of the user's code.

    Args:
        label: Text after "raised by".
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {label}")
        raise


class MetricReducers:
    """Custom reducers of a trial: none, until the trial wraps one of the extension."""

    def active(self, *, training: bool) -> Sequence[Any]:
        """Return the reducers of training or of validation."""
        del training
        return ()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each reducer, in the order of wrapping."""
        return []

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of :meth:`state_dict`; ignored if the number of reducers differs."""

    def validating(self) -> AbstractContextManager[None]:
        """Reset the reducers of validation for a block, then restore the values of training."""
        return nullcontext()

    def discarding(self) -> AbstractContextManager[None]:
        """Discard the values that validation adds in a block."""
        return nullcontext()

    def reset(self, *, training: bool) -> None:
        """Reset the reducers of training or of validation."""

    def reduce(self, distributed: Distributed, *, training: bool) -> ReducedMetrics:
        """Return the metrics of all active reducers, the same on every rank.

        **Collective** if any reducer is active.

        Raises:
            TrialError: If the result of a reducer has the wrong type.
        """
        del distributed, training
        return {}
