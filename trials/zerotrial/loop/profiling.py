"""Timings of the training loop, for the ``profiling`` block of an experiment."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from zerolab.contract.spec import ProfilingSpec

__all__ = ["LoopTimings"]


class LoopTimings:
    """Total seconds of the profiled batches, by phase.

    Args:
        settings: Profiled batches, and whether to synchronize the device.
        device: Device to synchronize before the clock is read.
    """

    def __init__(self, settings: ProfilingSpec, device: torch.device) -> None:
        self._settings = settings
        self._sync = settings.sync_timings and device.type == "cuda"
        self._batches = 0
        self._data_s = 0.0
        self._batch_s = 0.0
        self._started: float | None = None

    def begin(self, batch: int) -> None:
        """Start the timer if this batch, counted from 0, is profiled."""
        self._started = self._clock() if self._settings.covers(batch) else None

    def end(self) -> None:
        """Stop the timer of the current batch."""
        if self._started is not None:
            self._batch_s += self._clock() - self._started
            self._batches += 1
            self._started = None

    def wrap(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the same micro-batches that counts the time of each draw."""
        return _TimedIterator(batches, self)

    def pop_means(self) -> dict[str, float]:
        """Return mean seconds per batch since the last call; empty if no batch was timed."""
        if not self._batches:
            return {}
        means = {
            "profile_batch_seconds": self._batch_s / self._batches,
            "profile_data_seconds": self._data_s / self._batches,
            "profile_compute_seconds": (self._batch_s - self._data_s) / self._batches,
        }
        self._batches, self._data_s, self._batch_s = 0, 0.0, 0.0
        return means

    def add_wait(self, seconds: float) -> None:
        """Add time that the current batch waited for its data."""
        if self._started is not None:
            self._data_s += seconds

    def _clock(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter()


class _TimedIterator:
    def __init__(self, batches: Iterator[Any], timings: LoopTimings) -> None:
        self._source = batches
        self._timings = timings

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        batch = next(self._source)
        self._timings.add_wait(time.perf_counter() - started)
        return batch
