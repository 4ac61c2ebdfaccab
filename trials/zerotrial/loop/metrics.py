"""Training metrics between two reports, and conversion of users' metrics to numbers.

Nothing is converted while a batch trains. A loss stays a detached tensor until the report, so that
the loop never waits for a device. NaN and infinities are ordinary values.
"""

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerolab.errors import TrialError

__all__ = ["Entry", "UnreportedMetrics", "average_by_batch", "mean", "to_numbers"]

logger = logging.getLogger(__name__)

Entry = tuple[int, dict[str, float]]
"""Number of a batch (from 1), and its metrics on one rank."""

_FOLD_SIZE = 1024  # maximum outputs held as tensors; bounds memory when reports are rare
_MIN_STACK = 4  # minimum scalars for which one stacked transfer is cheaper
_warned: set[str] = set()


class UnreportedMetrics:
    """Outputs of ``train_batch`` on one rank since the last report."""

    def __init__(self) -> None:
        self._raw: list[tuple[int, Any]] = []
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._raw) + len(self._entries)

    def add(self, batch: int, output: Any) -> None:
        """Store one output of ``train_batch``.

        Args:
            batch: Number of the batch, counted from 1.
            output: A tensor (the loss) or a mapping of names to tensors or numbers.

        Raises:
            TrialError: If it is neither.
        """
        if isinstance(output, torch.Tensor):
            self._raw.append((batch, output.detach()))
        elif isinstance(output, Mapping):
            detached = {
                name: value.detach() if isinstance(value, torch.Tensor) else value
                for name, value in output.items()
            }
            self._raw.append((batch, detached))
        else:
            raise TrialError(
                "train_batch: must return the loss as a tensor, or a dict of metric names to "
                f"values, got {type(output).__name__}"
            )
        if len(self._raw) >= _FOLD_SIZE:
            self._fold()

    def entries(self) -> list[Entry]:
        """Return one entry for each batch: the mean over its micro-batches."""
        self._fold()
        if _has_one_entry_per_batch(self._entries):
            return list(self._entries)
        grouped: dict[int, list[dict[str, float]]] = {}
        for batch, values in self._entries:
            grouped.setdefault(batch, []).append(values)
        return [(batch, _average(values)) for batch, values in sorted(grouped.items())]

    def clear(self) -> None:
        """Drop all outputs after they were reported."""
        self._raw.clear()
        self._entries.clear()

    def state(self) -> list[Entry]:
        """Return the unreported metrics as plain data."""
        self._fold()
        return list(self._entries)

    def restore(self, entries: Iterable[Entry]) -> None:
        """Add the entries that :meth:`state` returned."""
        self._entries.extend((int(batch), dict(values)) for batch, values in entries)

    def _fold(self) -> None:
        """Convert stored tensors to numbers, with one transfer for all scalar losses."""
        raw, self._raw = self._raw, []
        if len(raw) == 1:  # a report after every batch
            batch, value = raw[0]
            numbers = to_numbers({"loss": value} if isinstance(value, torch.Tensor) else value)
            self._entries.append((batch, numbers))
            return
        scalars = [
            value for _, value in raw if isinstance(value, torch.Tensor) and value.numel() == 1
        ]
        floats = _to_floats(scalars)
        if len(floats) == len(raw):
            losses_only = zip(raw, floats, strict=True)
            self._entries += [(batch, {"loss": loss}) for (batch, _), loss in losses_only]
            return
        losses = iter(floats)
        for batch, value in raw:
            if not isinstance(value, torch.Tensor):
                numbers = to_numbers(value)
            elif value.numel() == 1:
                numbers = {"loss": next(losses)}
            else:
                numbers = to_numbers({"loss": value})
            self._entries.append((batch, numbers))


def _to_floats(scalars: list[torch.Tensor]) -> list[float]:
    if len(scalars) < _MIN_STACK:
        return [value.item() for value in scalars]
    try:
        stacked = torch.stack(scalars)
    except RuntimeError:  # shapes differ
        stacked = torch.stack([value.reshape(()) for value in scalars])
    floats: list[float] = stacked.double().flatten().tolist()
    return floats


def average_by_batch(entries: Sequence[Entry]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Average the entries of all ranks.

    Args:
        entries: One entry for each batch of each rank.

    Returns:
        The mean of each metric over all batches and ranks, and the means of each batch over the
        ranks, in the order of batches.
    """
    if len(entries) == 1:
        return dict(entries[0][1]), [entries[0][1]]
    averages = dict(_average([metrics for _, metrics in entries]))
    if _has_one_entry_per_batch(entries):
        return averages, [metrics for _, metrics in entries]
    batches: dict[int, list[dict[str, float]]] = {}
    for batch, metrics in entries:
        batches.setdefault(batch, []).append(metrics)
    return averages, [_average(batches[batch]) for batch in sorted(batches)]


def _has_one_entry_per_batch(entries: Sequence[Entry]) -> bool:
    """Return whether batches are strictly increasing, the common case."""
    if len(entries) < 2:  # a report after every batch
        return True
    batches = [batch for batch, _ in entries]
    return all(map(operator.lt, batches, batches[1:]))


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, correctly rounded if all values are finite."""
    if len(values) == 1:
        return values[0]
    if all(map(math.isfinite, values)):
        return math.fsum(values) / len(values)
    return sum(values) / len(values)


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar metrics as floats; warn once for each other name."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        number = _to_float(value)
        if number is None:
            if name not in _warned:
                _warned.add(name)
                logger.warning(
                    "metric %r is ignored: must be one number, got %s", name, type(value).__name__
                )
            continue
        numbers[str(name)] = number
    return numbers


def _to_float(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):  # first: the loss of every batch
        return float(value.item()) if value.numel() == 1 else None
    if isinstance(value, int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.item())
    return None


def _average(mappings: Sequence[dict[str, float]]) -> dict[str, float]:
    if len(mappings) == 1:
        return mappings[0]
    values: dict[str, list[float]] = {}
    for metrics in mappings:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: mean(numbers) for name, numbers in values.items()}
