"""What a GPU does behind a step: the communication that is hidden, and what phases wait for.

NCCL works in streams of its own, so that marks in the stream that computes do not see it. One step
in a line's interval is traced by torch's profiler: while a kernel of NCCL runs beside one that
computes, communication is hidden; while it runs alone, the phase under way waits for it.

Times are seconds from the trace's anchor, one small kernel that nothing runs beside.
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

from zerotrial.engine.watch.timers import Clock, CudaClock

__all__ = ["Behind", "GpuTrace", "behind", "make_trace"]

logger = logging.getLogger("zerotrial.engine")

Span = tuple[str, float, float]
"""The name of a phase or a kernel, its begin and its end."""

_COMMUNICATES = "nccl"
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
"""Between host and device: neither computing nor communication between ranks."""
_NO_KERNEL = ("Memcpy", "Memset")

_WAITING = ("forward", "backward", "evaluation", "step")
"""Phases that a collective of another stream may hold up; the others are waiting by themselves."""

_LONGEST_S = 60.0
"""A trace grows by a few hundred bytes for each kernel, on the host, and is read one by one."""

_STEP_NAME = "ProfilerStep"
"""What torch counts the steps of its profilers under, from when one is made until it is left."""


@dataclass(frozen=True)
class Behind:
    """What one traced step has shown."""

    hidden_s: float
    """Seconds in which a collective was under way while the GPU computed."""

    waiting: Mapping[str, float]
    """Phase to the part of its time, from 0 to 1, in which a collective ran and nothing else."""


def behind(kernels: Iterable[Span], spans: Sequence[Span]) -> Behind:
    """Compute which communication a step hides, and how much of each phase waits for it.

    Args:
        kernels: Kernels that ran on the device.
        spans: Phases of the step, nested, in the order of their begin.
    """
    # Sweep over all begins and ends. Between two of them the running kernels and the open phases
    # do not change. Phases are nested, so the one that began last is the innermost.
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
    hidden = at = 0.0
    own: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for time_s, kind, name, change in sorted(changes, key=lambda item: item[0]):
        passed, at = time_s - at, time_s
        if running["communication"] and running["compute"]:
            hidden += passed
        if phases:
            innermost = phases[max(phases)]
            own[innermost] += passed
            if running["communication"] and not running["compute"]:
                waited[innermost] += passed
        if kind != "phase":
            running[kind] += change
        elif change >= 0:
            phases[change] = name
        else:
            del phases[-change - 1]
    return Behind(
        hidden, {name: waited[name] / own[name] for name in own if name in _WAITING and own[name]}
    )


def _kind_of(kernel: str) -> str:
    if _COMMUNICATES in kernel:
        return "communication"
    return "" if kernel.startswith(_COPIES) else "compute"


def make_trace(device: torch.device, ranks: int) -> GpuTrace | None:
    """Make what traces steps, where collectives have streams of their own.

    Args:
        device: That the engine trains on.
        ranks: How many there are; one alone has nothing to wait for.

    Returns:
        None where nothing needs to be traced.
    """
    return GpuTrace(device) if device.type == "cuda" and ranks > 1 else None


class GpuTrace:
    """Traces a step at a time; torch's profiler is shared, so a user's own goes first.

    Args:
        device: That is traced.
        activity: What the profiler records.
        kind: Of device that its events must be of.
        clock: Marks the phases.
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
        self._thread = 0  # the profiler is started and stopped in one
        self._anchor: object = None
        self._spans: list[tuple[str, object, list[object]]] = []  # the end comes later
        # what came of it
        self._is_out_of_order = False
        self._was_too_long = False
        self._spent_s = 0.0
        self.missing = ""
        """Why nothing was seen the last time; nothing if it was."""

    @property
    def runs(self) -> bool:
        """Whether a step is being traced."""
        return self._profile is not None

    def begin(self) -> None:
        """Start, once the device has done everything; not while somebody else profiles."""
        if self._is_out_of_order:
            return
        if _is_taken():
            self.missing = "another profiler of torch's is there"
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
        """Mark what runs inside.

        Args:
            name: Of the phase.

        Yields:
            Nothing.
        """
        if self.runs and self._is_too_long():
            self.missing = f"a step that takes longer than {_LONGEST_S:.0f} s is not traced"
            # Once it may be models that are evaluated with gradients; twice all steps are so long.
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

    def end(self) -> Behind | None:
        """Stop, once the device has done everything.

        Returns:
            What was seen; None where no step was traced, or the profiler saw nothing.
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
                return behind(kernels, spans)
        return None

    def take_spent(self) -> float:
        """Return the seconds that tracing has taken since the last call, which are of no step.

        What the device had to do for its step when a trace began or ended is not among them.
        """
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def drop(self) -> None:
        """Stop, and do not wait for a device that may never be done."""
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
        """Whether a step does not end: models are evaluated with gradients, too."""
        passed = time.monotonic() - self._began
        return passed > _LONGEST_S and threading.get_ident() == self._thread

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _since(self, mark: object) -> float:
        return self._clock.seconds(self._anchor, mark)

    def _kernels(self, trace: profile) -> list[Span]:
        """Name, begin and end of everything but the anchor, the first that is no copy."""
        # Not events(), which takes twenty times as long to make more of the same.
        results = trace.profiler and trace.profiler.kineto_results
        ran = sorted(
            (event.start_ns(), event.end_ns(), event.name())
            for event in (results.events() if results else ())
            if event.device_type() == self._kind and not event.is_user_annotation()
        )
        first = next((i for i, one in enumerate(ran) if not one[2].startswith(_NO_KERNEL)), None)
        if first is None:
            raise RuntimeError("the profiler has seen nothing of the device")
        _, zero, _ = ran.pop(first)
        # of nanoseconds since 1970 a float would lose hundreds
        return [(name, (begin - zero) / 1e9, (end - zero) / 1e9) for begin, end, name in ran]

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Training goes on, whatever a profiler cannot do here; what is missing is said once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of the profiler, or a driver's
            self._is_out_of_order = True
            self.missing = "torch's profiler cannot trace this device"
            self.drop()
            logger.warning(
                "wall_clock_breakdown: torch's profiler cannot trace this device (%s); what NCCL "
                "does in streams of its own counts as forward and backward, and what of it is "
                "hidden is not told",
                error,
            )


def _stop(trace: profile) -> None:
    """Stop a profiler whose trace nobody wants: one of an engine that is gone, or that failed."""
    if trace.profiler is not None:
        trace.profiler.use_device = None  # else it waits for the device
    with suppress(Exception):  # of one that never started, or is another thread's
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    KinetoStepTracker.erase_step_count(_STEP_NAME)


def _is_taken() -> bool:
    """Whether somebody else profiles, or waits to: of torch's profilers one runs at a time."""
    enabled = torch._C._autograd._profiler_enabled()  # noqa: SLF001 - no public way
    return enabled or _STEP_NAME in getattr(KinetoStepTracker, "_step_dict", {})


@contextmanager
def _quiet() -> Iterator[None]:
    """Have the profiler's library, which reads this when it starts first, tell of no stages."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above all that it has
    try:
        yield
    finally:
        del os.environ[name]
