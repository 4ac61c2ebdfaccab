"""Breakdown of step time into shares of phases that add up to one.

A nested phase counts only for itself: waiting for other ranks during backward is communication, not
backward. Communication hidden behind other phases takes no extra time, so it is reported separately
and is in no sum. On a GPU both come from a trace of one step, see
:mod:`~zerotrial.extensions.profiler.trace`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from zerotrial.engine.protocols import COMMUNICATION
from zerotrial.extensions.profiler.timers import PhaseTimer
from zerotrial.extensions.profiler.trace import TraceResult, make_trace

__all__ = ["Breakdown"]

_ALWAYS = ("input", "forward", "backward", COMMUNICATION, "step")
_BETWEEN = "between"
_OPENS = ("forward", "backward")
"""Phases that start a traced step: input, gathering and sending may belong to something else."""
_APART = 9
"""Smallest number of steps between two traces, since a trace may take as long as its step. After
the second step, the first that may be traced, the tenth or a later one is next."""


class Breakdown:
    """Timer of the phases of steps.

    Args:
        device: Device to time.
        ranks: Number of ranks; a single rank never waits.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._timer = PhaseTimer(device)
        self._overlap = Overlap() if device.type == "cpu" else None
        self._trace = make_trace(device, ranks)
        self._trace_result: TraceResult | None = None
        self._has_traced = False
        self._steps_since = 0  # since the last trace
        self._is_due = False  # whether to trace the next step
        self.shares: dict[str, float] = {}
        """``forward_share`` and so on of the last :meth:`line`; they add up to one. Plus
        ``hidden_communication_share``, if known."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        self._begin_trace(name)
        waiting = self._overlap is not None and name == COMMUNICATION
        if waiting:
            self._overlap_changes(inside=1)
        try:
            traced = nullcontext() if self._trace is None else self._trace.phase(name)
            with self._timer.phase(name), traced:
                yield
        finally:
            if waiting:
                self._overlap_changes(inside=-1)

    def under_way(self, change: int) -> None:
        """Count collectives that start (1) or end (-1)."""
        self._overlap_changes(under_way=change)

    def restart(self) -> None:
        """Clear all measurements except for a recent trace."""
        self._timer.take()
        if self._overlap is not None:
            self._overlap.take()
        if self._has_traced and self._steps_since < _APART:
            return
        self._trace_result, self._has_traced = None, False
        self._is_due = self._trace is not None

    def end_trace(self) -> float:
        """Store the result of a traced step; waits for the device if there was one.

        Returns:
            Seconds spent on tracing, which do not belong to the step.
        """
        self._steps_since += 1
        if self._trace is None:
            return 0.0
        if self._trace.runs:
            self._trace_result = self._trace.end()
        self._is_due = not self._has_traced
        return self._trace.take_spent()

    def drop_trace(self) -> None:
        """Stop tracing, without waiting."""
        if self._trace is not None:
            self._trace.drop()

    def _begin_trace(self, name: str) -> None:
        """Start a trace until :meth:`end_trace`, if one is due.

        A step is traced from its start or not at all: while the profiler is in use, for instance by
        another engine's unfinished step, the next step is tried.
        """
        if self._is_due and self._trace is not None and name in _OPENS:
            self._trace.begin()
            self._has_traced, self._steps_since = self._trace.runs, 0
            self._is_due = False

    def line(self, seconds: float, steps: int) -> str:
        """Return the line about step time since the last restart, and update :attr:`shares`.

        Args:
            seconds: Seconds of one step.
            steps: Number of steps since the restart.
        """
        spent = {name: total / steps for name, total in self._timer.take().items()}
        if self._trace_result is not None:
            for name, part in self._trace_result.waiting.items():
                waited = spent.get(name, 0.0) * part
                spent[name] = spent.get(name, 0.0) - waited
                spent[COMMUNICATION] = spent.get(COMMUNICATION, 0.0) + waited
        names = [*_ALWAYS, *(name for name in spent if name not in _ALWAYS)]
        seconds_by_phase = {name: spent.get(name, 0.0) for name in names}
        seconds_by_phase[_BETWEEN] = max(0.0, seconds - sum(seconds_by_phase.values()))
        # A GPU's clock may be ahead of the host's by a step: shares refer to the measured sum.
        measured_s = max(sum(seconds_by_phase.values()), 1e-9)
        self.shares = {
            f"{name}_share": part / measured_s for name, part in seconds_by_phase.items()
        }
        parts = [
            f"{name} {part * 1e3:.2f} ms ({part / measured_s:.0%})"
            for name, part in seconds_by_phase.items()
        ]
        text = f"time of a step, {seconds * 1e3:.2f} ms: {', '.join(parts)}"
        if (hidden := self._hidden(measured_s, steps)) is not None:
            self.shares[f"hidden_{COMMUNICATION}_share"] = hidden / measured_s
            text += f"; {COMMUNICATION} hidden behind them {hidden * 1e3:.2f} ms"
            text += f" ({hidden / measured_s:.0%})"
        if self._trace is not None and self._trace_result is None and self._trace.missing:
            text += f"; NCCL communication is unknown: {self._trace.missing}"
        return text

    def _hidden(self, total: float, steps: int) -> float | None:
        """Return the hidden seconds of a step; None without communication or without a trace."""
        if self._overlap is not None and self._overlap.is_used:
            # bounded by the step: time has passed since it ended
            return min(self._overlap.take() / steps, total)
        return min(self._trace_result.hidden_s, total) if self._trace_result is not None else None

    def _overlap_changes(self, *, under_way: int = 0, inside: int = 0) -> None:
        if self._overlap is not None:
            self._overlap.change(under_way=under_way, inside=inside)


class Overlap:
    """Accumulator of the time in which a collective is in progress while its rank does other work.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._under_way = 0
        self._inside = 0
        self._since = 0.0
        self._hidden = 0.0
        self.is_used = False
        """Whether any collective has been counted."""

    def change(self, *, under_way: int = 0, inside: int = 0) -> None:
        """Record that collectives start or end, or that the rank enters or leaves a call."""
        now = self._clock()
        if self._under_way and not self._inside:
            self._hidden += now - self._since
        self._since = now
        self.is_used = self.is_used or under_way > 0
        self._under_way = max(0, self._under_way + under_way)
        self._inside += inside

    def take(self) -> float:
        """Return the seconds since the last call; collectives that never ended are dropped."""
        self.change()
        hidden, self._hidden, self._under_way = self._hidden, 0.0, 0
        return hidden
