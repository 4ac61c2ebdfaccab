"""Where a step's time goes, without making the device wait while it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

_MOST_SPANS = 4096
"""Kept until they are added up, which may wait for the device."""


class Clock(Protocol):
    """Takes marks now and turns them into seconds later."""

    def mark(self) -> object:
        """Remember this moment; cheap, and does not wait for the device."""
        ...

    def seconds(self, begin: object, end: object) -> float:
        """Seconds between two marks; may wait for the device."""
        ...


class HostClock:
    """For devices that have done their work when a call returns, such as the CPU."""

    def mark(self) -> float:
        """Return the monotonic time in seconds."""
        return time.perf_counter()

    def seconds(self, begin: object, end: object) -> float:
        """Return the difference of two marks."""
        if not (isinstance(begin, float) and isinstance(end, float)):
            raise TypeError("marks of another clock")
        return end - begin


class CudaClock:
    """Marks are events in the GPU's stream: they tell when the GPU got there, not the host."""

    def mark(self) -> torch.cuda.Event:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: object, end: object) -> float:
        """Wait until the GPU has passed the second mark."""
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
    """Sums the time of named phases; a phase inside another counts only for itself.

    Args:
        device: Whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
        self._spans: list[_Span] = []
        self._open: list[int] = []
        self._totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside.

        Args:
            name: Spans of one name are added up.

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
        """Return the seconds of each phase since the last call, and start again from zero.

        Returns:
            Name to seconds, in the order in which the names came up first; phases still open
            are not counted.
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
