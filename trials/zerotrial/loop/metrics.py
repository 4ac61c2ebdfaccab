"""Training metrics between two reports, and numbers out of whatever users return.

Nothing is converted while a batch trains: a loss stays a detached tensor until the report, so
that the loop never waits for a device. NaN and infinities are values like any others.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from zerolab.errors import TrialError

__all__ = ["Entry", "UnreportedMetrics", "average_by_batch", "mean", "to_numbers"]

logger = logging.getLogger(__name__)

Entry = tuple[int, dict[str, float]]
"""A batch's count, and its metrics on one rank."""

_FOLD_AT = 1024  # outputs kept as tensors at most; bounds memory when reports are rare
_STACK_FROM = 4  # scalars from which one transfer of all is cheaper
_warned: set[str] = set()


class UnreportedMetrics:
    """What ``train_batch`` returned since the last report, on one rank."""

    def __init__(self) -> None:
        self._raw: list[tuple[int, Any]] = []
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._raw) + len(self._entries)

    def add(self, batch: int, output: Any) -> None:
        """Keep one output of ``train_batch``.

        Args:
            batch: How many batches are complete once this one is.
            output: A tensor (the loss) or a mapping of names to tensors or numbers.

        Raises:
            TrialError: If it is neither.
        """
        if isinstance(output, torch.Tensor):
            self._raw.append((batch, output.detach()))
        elif isinstance(output, Mapping):
            kept = {
                name: value.detach() if isinstance(value, torch.Tensor) else value
                for name, value in output.items()
            }
            self._raw.append((batch, kept))
        else:
            raise TrialError(
                "train_batch: must return the loss as a tensor, or a dict of metric names to "
                f"values, got {type(output).__name__}"
            )
        if len(self._raw) >= _FOLD_AT:
            self._fold()

    def entries(self) -> list[Entry]:
        """One entry for each batch since the last report: the mean over its micro-batches."""
        self._fold()
        if _one_each(self._entries):
            return list(self._entries)
        grouped: dict[int, list[dict[str, float]]] = {}
        for batch, values in self._entries:
            grouped.setdefault(batch, []).append(values)
        return [(batch, _mean_of(values)) for batch, values in sorted(grouped.items())]

    def clear(self) -> None:
        """Forget them: they are reported."""
        self._raw.clear()
        self._entries.clear()

    def state(self) -> list[Entry]:
        """What is not reported yet, as plain data."""
        self._fold()
        return list(self._entries)

    def restore(self, entries: Iterable[Entry]) -> None:
        """Go on with what :meth:`state` returned."""
        self._entries.extend((int(batch), dict(values)) for batch, values in entries)

    def _fold(self) -> None:
        """Turn kept tensors into numbers, in one transfer for all bare losses."""
        raw, self._raw = self._raw, []
        bare = [value for _, value in raw if isinstance(value, torch.Tensor) and value.numel() == 1]
        losses = iter(_values(bare))
        for batch, value in raw:
            if not isinstance(value, torch.Tensor):
                numbers = to_numbers(value)
            elif value.numel() == 1:
                numbers = {"loss": next(losses)}
            else:
                numbers = to_numbers({"loss": value})
            self._entries.append((batch, numbers))


def _values(scalars: list[torch.Tensor]) -> list[float]:
    if len(scalars) < _STACK_FROM:
        return [value.item() for value in scalars]
    flat = [value if value.dim() == 0 else value.reshape(()) for value in scalars]
    stacked: list[float] = torch.stack(flat).double().tolist()
    return stacked


def average_by_batch(entries: Sequence[Entry]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Average what all ranks have not reported yet, once.

    Args:
        entries: Of all ranks, one for each batch of each rank.

    Returns:
        The mean of each metric over all batches of all ranks, and the means of each batch over the
        ranks, in the order of batches.
    """
    averages = dict(_mean_of([metrics for _, metrics in entries]))
    if _one_each(entries):
        return averages, [metrics for _, metrics in entries]
    batches: dict[int, list[dict[str, float]]] = {}
    for batch, metrics in entries:
        batches.setdefault(batch, []).append(metrics)
    return averages, [_mean_of(batches[batch]) for batch in sorted(batches)]


def _one_each(entries: Sequence[Entry]) -> bool:
    """Whether there is one entry a batch, in the order of batches: the common case."""
    return len(entries) < 2 or all(one[0] < two[0] for one, two in pairwise(entries))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, exactly rounded where all values are finite."""
    if len(values) == 1:
        return values[0]
    if all(map(math.isfinite, values)):
        return math.fsum(values) / len(values)
    return sum(values) / len(values)


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Keep the metrics that are one number each; others are left out with one warning a name."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        number = _number(value)
        if number is None:
            if name not in _warned:
                _warned.add(name)
                logger.warning(
                    "metric %r is left out: must be one number, got %s", name, type(value).__name__
                )
            continue
        numbers[str(name)] = number
    return numbers


def _number(value: Any) -> float | None:
    if isinstance(value, int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.item())
    return None


def _mean_of(many: Sequence[dict[str, float]]) -> dict[str, float]:
    if len(many) == 1:
        return many[0]
    values: dict[str, list[float]] = {}
    for metrics in many:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: mean(found) for name, found in values.items()}
