"""Timers of phases that do not make the device wait while measuring."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

_MOST_SPANS = 4096
"""Number of spans kept before they are summed, which may wait for the device."""


class Clock(Protocol):
    """Clock that marks moments now and converts them to seconds later."""

    def mark(self) -> object:
        """Record this moment; cheap, and does not wait for the device."""
        ...

    def seconds(self, begin: object, end: object) -> float:
        """Return the seconds between two marks; may wait for the device."""
        ...


class HostClock:
    """Clock of devices that have finished their work when a call returns, such as the CPU."""

    def mark(self) -> float:
        """Return the monotonic time in seconds."""
        return time.perf_counter()

    def seconds(self, begin: object, end: object) -> float:
        """Return the difference of two marks."""
        if not (isinstance(begin, float) and isinstance(end, float)):
            raise TypeError("marks of another clock")
        return end - begin


class CudaClock:
    """Clock of events in a GPU stream, which record the GPU's time, not the host's."""

    def mark(self) -> torch.cuda.Event:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: object, end: object) -> float:
        """Wait until the GPU has passed the second mark; return the seconds between."""
        if not (isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)):
            raise TypeError("marks of another clock")
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass
class _Span:
    name: str
    begin: object
    parent: int | None
    end: object = None


class PhaseTimer:
    """Sums of the time of named phases; a nested phase counts only for itself."""

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
        self._spans: list[_Span] = []
        self._open: list[int] = []
        self._totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block.

        Args:
            name: Name of the phase; blocks of one name are summed.

        Yields:
            Nothing.
        """
        parent = self._open[-1] if self._open else None
        span = _Span(name, self._clock.mark(), parent)
        self._open.append(len(self._spans))
        self._spans.append(span)
        try:
            yield
        finally:
            span.end = self._clock.mark()
            self._open.pop()
            if not self._open and len(self._spans) >= _MOST_SPANS:
                self._fold()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them.

        Returns:
            Name to seconds, in order of first appearance; open phases are not counted.
        """
        self._fold()
        totals, self._totals = self._totals, {}
        return totals

    def _fold(self) -> None:
        spans, self._spans, self._open = self._spans, [], []
        totals = self._totals
        for span in spans:
            if span.end is None:
                continue
            seconds = self._clock.seconds(span.begin, span.end)
            totals[span.name] = totals.get(span.name, 0.0) + seconds
            if span.parent is not None and spans[span.parent].end is not None:
                outer = spans[span.parent].name
                totals[outer] = totals.get(outer, 0.0) - seconds
