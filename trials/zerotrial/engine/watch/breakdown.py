"""Where the time of a step goes: shares of the phases, which add up to one.

A phase inside another counts for itself only: what a rank waits for in the middle of backward is
communication and not backward. Communication that runs behind other phases takes no time of its
own, so that it is told besides, and is in no sum. On a GPU both are seen in a trace of one step;
see :mod:`~zerotrial.engine.watch.trace`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from zerotrial.engine.comm.timed_collectives import COMMUNICATION
from zerotrial.engine.watch.timers import PhaseTimer
from zerotrial.engine.watch.trace import Behind, make_trace

__all__ = ["Breakdown"]

_ALWAYS = ("input", "forward", "backward", COMMUNICATION, "step")
_BETWEEN = "between"
_OPENS = ("forward", "backward")
"""Phases that a traced step begins with: not what is drawn, gathered or sent for anything else."""
_APART = 9
"""Steps from one that is traced to the next, at least: a trace may take as long as its step. From
the second step, the first that may be traced, it is nine to the first after the tenth."""


class Breakdown:
    """Times the phases of steps.

    Args:
        device: That is timed.
        ranks: How many there are; one alone has nothing to wait for.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._timer = PhaseTimer(device)
        self._overlap = Overlap() if device.type == "cpu" else None
        self._trace = make_trace(device, ranks)
        self._behind: Behind | None = None
        self._has_traced = False
        self._steps_since = 0  # then
        self._is_due = False  # a trace, if the step has not begun
        self.shares: dict[str, float] = {}
        """``forward_share`` and so on, of the last :meth:`line`; they add up to one.
        ``hidden_communication_share`` comes besides, where it is known."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside.

        Args:
            name: Of the phase.

        Yields:
            Nothing.
        """
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
        """Count collectives that have been started and have not ended."""
        self._overlap_changes(under_way=change)

    def restart(self) -> None:
        """Forget what was measured so far, but for a trace that is not old."""
        self._timer.take()
        if self._overlap is not None:
            self._overlap.take()
        if self._has_traced and self._steps_since < _APART:
            return
        self._behind, self._has_traced = None, False
        self._is_due = self._trace is not None

    def end_trace(self) -> float:
        """Keep what a traced step shows; waits for the device, where one was traced.

        Returns:
            Seconds that its tracing took, which are of no step.
        """
        self._steps_since += 1
        if self._trace is None:
            return 0.0
        if self._trace.runs:
            self._behind = self._trace.end()
        self._is_due = not self._has_traced
        return self._trace.take_spent()

    def drop_trace(self) -> None:
        """Stop tracing, if a step is being traced; waits for nothing."""
        if self._trace is not None:
            self._trace.drop()

    def _begin_trace(self, name: str) -> None:
        """Trace what comes until :meth:`end_trace`, if that is due.

        A step is traced from its beginning or not at all: where a profiler is taken, as by another
        engine whose step is not over, the next one is tried.
        """
        if self._is_due and self._trace is not None and name in _OPENS:
            self._trace.begin()
            self._has_traced, self._steps_since = self._trace.runs, 0
            self._is_due = False

    def line(self, seconds: float, steps: int) -> str:
        """Say where the time of a step went since the last restart, and keep :attr:`shares`.

        Args:
            seconds: Of one step.
            steps: Since then.
        """
        spent = {name: total / steps for name, total in self._timer.take().items()}
        if self._behind is not None:
            for name, part in self._behind.waiting.items():
                waited = spent.get(name, 0.0) * part
                spent[name] = spent.get(name, 0.0) - waited
                spent[COMMUNICATION] = spent.get(COMMUNICATION, 0.0) + waited
        names = [*_ALWAYS, *(name for name in spent if name not in _ALWAYS)]
        found = {name: spent.get(name, 0.0) for name in names}
        found[_BETWEEN] = max(0.0, seconds - sum(found.values()))
        # The clock of a GPU may be ahead of the host's by a step: shares are of what was measured.
        whole = max(sum(found.values()), 1e-9)
        self.shares = {f"{name}_share": part / whole for name, part in found.items()}
        parts = [f"{name} {part * 1e3:.2f} ms ({part / whole:.0%})" for name, part in found.items()]
        text = f"time of a step, {seconds * 1e3:.2f} ms: {', '.join(parts)}"
        if (hidden := self._hidden(whole, steps)) is not None:
            self.shares[f"hidden_{COMMUNICATION}_share"] = hidden / whole
            text += f"; {COMMUNICATION} hidden behind them {hidden * 1e3:.2f} ms"
            text += f" ({hidden / whole:.0%})"
        if self._trace is not None and self._behind is None and self._trace.missing:
            text += f"; what NCCL does beside them is not known: {self._trace.missing}"
        return text

    def _hidden(self, whole: float, steps: int) -> float | None:
        """Seconds of a step; None where nothing communicates, or nobody knows."""
        if self._overlap is not None and self._overlap.is_used:
            # not with what has passed since the step ended
            return min(self._overlap.take() / steps, whole)
        return min(self._behind.hidden_s, whole) if self._behind is not None else None

    def _overlap_changes(self, *, under_way: int = 0, inside: int = 0) -> None:
        if self._overlap is not None:
            self._overlap.change(under_way=under_way, inside=inside)


class Overlap:
    """The time in which a collective is under way while its rank does something else.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._under_way = 0
        self._inside = 0
        self._since = 0.0
        self._hidden = 0.0
        self.is_used = False
        """Whether there was a collective yet."""

    def change(self, *, under_way: int = 0, inside: int = 0) -> None:
        """Take note that collectives begin or end, or that the rank turns to them or away."""
        now = self._clock()
        if self._under_way and not self._inside:
            self._hidden += now - self._since
        self._since = now
        self.is_used = self.is_used or under_way > 0
        self._under_way = max(0, self._under_way + under_way)
        self._inside += inside

    def take(self) -> float:
        """Return the seconds since the last call; collectives that never ended are forgotten."""
        self.change()
        found, self._hidden, self._under_way = self._hidden, 0.0, 0
        return found
