"""Timings of the training loop, for the ``profiling`` block of an experiment."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from zerolab.contract.spec import ProfilingSpec

__all__ = ["LoopTimings"]


class LoopTimings:
    """Adds up where the seconds of the timed batches go.

    Args:
        settings: Which batches are timed.
        device: Waited for before the clock is read, if the settings say so.
    """

    def __init__(self, settings: ProfilingSpec, device: torch.device) -> None:
        self._settings = settings
        self._sync = settings.sync_timings and device.type == "cuda"
        self._batches = 0
        self._data_s = 0.0
        self._batch_s = 0.0
        self._started: float | None = None

    def begin(self, batch: int) -> None:
        """A batch, counted from 0, begins."""
        self._started = self._clock() if self._settings.covers(batch) else None

    def end(self) -> None:
        """The batch is done."""
        if self._started is not None:
            self._batch_s += self._clock() - self._started
            self._batches += 1
            self._started = None

    def timed(self, feed: Iterator[Any]) -> Iterator[Any]:
        """An iterator over the same micro-batches, whose waiting is counted."""
        return _TimedFeed(feed, self)

    def take(self) -> dict[str, float]:
        """Mean seconds a batch since the last call; empty when no batch was timed."""
        if not self._batches:
            return {}
        found = {
            "profile_batch_seconds": self._batch_s / self._batches,
            "profile_data_seconds": self._data_s / self._batches,
            "profile_compute_seconds": (self._batch_s - self._data_s) / self._batches,
        }
        self._batches, self._data_s, self._batch_s = 0, 0.0, 0.0
        return found

    def waited(self, seconds: float) -> None:
        """Count time that a timed batch waited for its data."""
        if self._started is not None:
            self._data_s += seconds

    def _clock(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter()


class _TimedFeed:
    def __init__(self, feed: Iterator[Any], timings: LoopTimings) -> None:
        self._feed = feed
        self._timings = timings

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        batch = next(self._feed)
        self._timings.waited(time.perf_counter() - started)
        return batch
