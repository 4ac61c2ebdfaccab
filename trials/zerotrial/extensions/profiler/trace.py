"""Trace of a GPU during a step: hidden communication, and phases that wait for it.

NCCL uses separate streams, which marks in the compute stream do not cover. So torch's profiler
traces one step per progress line. While an NCCL kernel runs beside a compute kernel, communication
is hidden. While it runs alone, the current phase waits for it.

Times are seconds from the trace's anchor, a small kernel without concurrent work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import ProfilerActivity, profile

from zerotrial.extensions.profiler.timers import Clock, CudaClock

__all__ = ["GpuTrace", "TraceResult", "analyze_trace", "make_trace"]

logger = logging.getLogger("zerotrial.engine")

Span = tuple[str, float, float]
"""Name of a phase or a kernel, its start and its end."""

_COMMUNICATES = "nccl"
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
"""Copies between host and device: neither computation nor communication between ranks."""
_NO_KERNEL = ("Memcpy", "Memset")

_WAITING = ("forward", "backward", "evaluation", "step")
"""Phases that a collective of another stream may delay; other phases wait by themselves."""

_LONGEST_S = 60.0
"""Longest traced step: a trace takes a few hundred bytes per kernel, and slow host processing."""

_STEP_NAME = "ProfilerStep"
"""Name under which torch counts its profilers' steps while they exist."""


@dataclass(frozen=True)
class TraceResult:
    """Result of one traced step."""

    hidden_s: float
    """Seconds with a collective in progress while the GPU computed."""

    waiting: Mapping[str, float]
    """Share of each phase's time, from 0 to 1, in which only a collective ran."""


def analyze_trace(kernels: Iterable[Span], spans: Sequence[Span]) -> TraceResult:
    """Compute the hidden communication of a step, and the share of each phase that waits.

    Args:
        kernels: Kernels that ran on the device.
        spans: Phases of the step, nested, in order of their start.
    """
    # Sweep over all begins and ends. Between two of them the running kernels and the open phases
    # do not change. Phases are nested, so the latest is the innermost.
    changes: list[tuple[float, str, str, int]] = [
        (time_s, kind, "", change)
        for name, begin, end in kernels
        for time_s, change in ((begin, 1), (end, -1))
        if (kind := _kind_of(name))
    ]
    for order, (name, begin, end) in enumerate(spans):
        changes += [(begin, "phase", name, order), (max(begin, end), "phase", name, -order - 1)]
    running = {"communication": 0, "compute": 0}
    phases: dict[int, str] = {}
    hidden = last_s = 0.0
    phase_seconds: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for time_s, kind, name, change in sorted(changes, key=lambda item: item[0]):
        passed, last_s = time_s - last_s, time_s
        if running["communication"] and running["compute"]:
            hidden += passed
        if phases:
            innermost = phases[max(phases)]
            phase_seconds[innermost] += passed
            if running["communication"] and not running["compute"]:
                waited[innermost] += passed
        if kind != "phase":
            running[kind] += change
        elif change >= 0:
            phases[change] = name
        else:
            del phases[-change - 1]
    return TraceResult(
        hidden,
        {
            name: waited[name] / phase_seconds[name]
            for name in phase_seconds
            if name in _WAITING and phase_seconds[name]
        },
    )


def _kind_of(kernel: str) -> str:
    if _COMMUNICATES in kernel:
        return "communication"
    return "" if kernel.startswith(_COPIES) else "compute"


def make_trace(device: torch.device, ranks: int) -> GpuTrace | None:
    """Return a tracer of steps, if collectives have separate streams.

    Args:
        device: Training device.
        ranks: Number of ranks; a single rank never waits.

    Returns:
        None if no trace is needed.
    """
    return GpuTrace(device) if device.type == "cuda" and ranks > 1 else None


class GpuTrace:
    """Tracer of one step at a time; a user's profiler has priority, since torch's is shared.

    Args:
        device: Device to trace.
        activity: Activity for the profiler to record.
        kind: Device type of the relevant events.
        clock: Clock of the phases.
    """

    def __init__(
        self,
        device: torch.device,
        activity: ProfilerActivity = ProfilerActivity.CUDA,
        kind: DeviceType = DeviceType.CUDA,
        clock: Clock | None = None,
    ) -> None:
        self._device = device
        self._activity = activity
        self._kind = kind
        self._clock = clock or CudaClock()
        self._marker = torch.zeros(1, device=device)
        # while a step is traced
        self._profile: profile | None = None
        self._stopping: weakref.finalize[[profile], GpuTrace] | None = None
        self._began = 0.0
        self._thread = 0  # starts and stops the profiler, as required
        self._anchor: object = None
        self._spans: list[tuple[str, object, list[object]]] = []  # the end comes later
        # result of the last trace
        self._is_out_of_order = False
        self._was_too_long = False
        self._spent_s = 0.0
        self.missing = ""
        """Reason why the last step was not traced; empty if it was."""

    @property
    def runs(self) -> bool:
        """Whether a step is being traced."""
        return self._profile is not None

    def begin(self) -> None:
        """Start when the device is idle, unless another profiler is active."""
        if self._is_out_of_order:
            return
        if _is_taken():
            self.missing = "another torch profiler is active"
            return
        self._spans = []
        with self._reporting(), _quiet():
            self._wait()
            with self._counting():
                # Without acc_events, torch 2.10 to 2.12 warn of more cycles than the only one here.
                trace = profile(activities=[self._activity], acc_events=True)
                self._stopping = weakref.finalize(self, _stop, trace)
                self._began, self._thread = time.monotonic(), threading.get_ident()
                trace.__enter__()  # type: ignore[no-untyped-call]  # ends in another call
                if trace.profiler is not None:
                    trace.profiler.acc_events = False  # else it parses all events as it stops
                self._profile = trace
                self._marker.add_(1)
                self._anchor = self._clock.mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block."""
        if self.runs and self._is_too_long():
            self.missing = f"a step that takes longer than {_LONGEST_S:.0f} s is not traced"
            # A single long step may include an evaluation with gradients; two mean all are long.
            self._is_out_of_order, self._was_too_long = self._was_too_long, True
            self.drop()
        if not self.runs:
            yield
            return
        end: list[object] = []
        self._spans.append((name, self._clock.mark(), end))
        try:
            yield
        finally:
            end.append(self._clock.mark())

    def end(self) -> TraceResult | None:
        """Stop when the device is idle.

        Returns:
            The result; None if no step was traced, or the profiler recorded nothing.
        """
        trace, self._profile = self._profile, None
        if trace is None or self._stopping is None:
            return None
        with self._reporting():
            self._wait()
            with self._counting():
                trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._stopping.detach()
                kernels = self._kernels(trace)
                spans = [
                    (name, self._since(begin), self._since(end[0]))
                    for name, begin, end in self._spans
                    if end
                ]
                self._spans = []
                self.missing, self._was_too_long = "", False
                return analyze_trace(kernels, spans)
        return None

    def take_spent(self) -> float:
        """Return the seconds spent on tracing since the last call.

        Work of the device for its step at the start or end of a trace is not included.
        """
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def drop(self) -> None:
        """Stop without waiting for the device, which may never finish."""
        self._profile, self._spans = None, []
        if self._stopping is not None:
            with self._counting():
                self._stopping()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began

    def _is_too_long(self) -> bool:
        """Return whether the traced step is too long, e.g. an evaluation with gradients."""
        passed = time.monotonic() - self._began
        return passed > _LONGEST_S and threading.get_ident() == self._thread

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _since(self, mark: object) -> float:
        return self._clock.seconds(self._anchor, mark)

    def _kernels(self, trace: profile) -> list[Span]:
        """Return name, start and end of all kernels but the anchor, the first that is no copy."""
        # Not events(), which takes twenty times as long and converts more than is needed.
        results = trace.profiler and trace.profiler.kineto_results
        ran = sorted(
            (event.start_ns(), event.end_ns(), event.name())
            for event in (results.events() if results else ())
            if event.device_type() == self._kind and not event.is_user_annotation()
        )
        first = next(
            (i for i, kernel in enumerate(ran) if not kernel[2].startswith(_NO_KERNEL)), None
        )
        if first is None:
            raise RuntimeError("the profiler has seen nothing of the device")
        _, zero, _ = ran.pop(first)
        # A float would lose hundreds of nanoseconds of a time since 1970.
        return [(name, (begin - zero) / 1e9, (end - zero) / 1e9) for begin, end, name in ran]

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Log a profiler's failure once and continue training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised by the profiler or a driver
            self._is_out_of_order = True
            self.missing = "torch's profiler cannot trace this device"
            self.drop()
            logger.warning(
                "wall_clock_breakdown: torch's profiler cannot trace this device (%s); NCCL's "
                "communication counts as forward and backward, and hidden communication is not "
                "reported",
                error,
            )


def _stop(trace: profile) -> None:
    """Stop a profiler without reading its trace, for an engine that is gone or has failed."""
    if trace.profiler is not None:
        trace.profiler.use_device = None  # else it waits for the device
    with suppress(Exception):  # it may not have started, or belong to another thread
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    KinetoStepTracker.erase_step_count(_STEP_NAME)


def _is_taken() -> bool:
    """Return whether another profiler is active or waiting: torch supports one at a time."""
    enabled = torch._C._autograd._profiler_enabled()  # noqa: SLF001 - no public way
    return enabled or _STEP_NAME in getattr(KinetoStepTracker, "_step_dict", {})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's library, which reads its log level on first start."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above all of its levels
    try:
        yield
    finally:
        del os.environ[name]
