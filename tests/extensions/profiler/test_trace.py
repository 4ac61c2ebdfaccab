"""Traced steps: overlapped communication, and phases that wait for it.

The kernels are simulated, the profiler is torch's. Tests on a real GPU are in
``tests/trial/test_on_gpu.py``.
"""

import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

import zerotrial
from tests.extensions.profiler.test_breakdown import STEPS, Square, watched
from zerotrial.extensions.profiler.breakdown import Breakdown
from zerotrial.extensions.profiler.timers import HostClock
from zerotrial.extensions.profiler.trace import GpuTrace, Span, TraceResult, analyze_trace

CPU = torch.device("cpu")


def trace_of_cpu() -> GpuTrace:
    return GpuTrace(CPU, ProfilerActivity.CPU, DeviceType.CPU, HostClock())


def test_waiting_share_leaves_out_inner_phases() -> None:
    spans = [
        ("step", 0, 10),
        ("backward", 1, 3),
        ("backward", 3, 4),
        ("send", 6, 9),
        ("step", 12, 13),
    ]
    result = analyze_trace([("nccl", 0.0, 2.0), ("gemm", 1.5, 1.75), ("nccl", 7.0, 9.5)], spans)
    # step alone: 0-1, 4-6, 9-10 and 12-13, of which 0-1 and 9-9.5 wait
    assert result.waiting == {"step": 1.5 / 5, "backward": 0.75 / 3}
    assert result.hidden_s == 0.25


def test_nccl_kernel_is_hidden_or_waited_for() -> None:
    gather, reduce = "ncclDevKernel_AllGather_RING_LL(args)", "ncclKernel_ReduceScatter"
    kernels = [
        (gather, 0, 4),  # forward waits for 2, then computes behind it
        ("gemm", 2, 9),
        ("gemm", 3, 5),  # in a second stream: the same time once more
        (reduce, 9, 12),  # backward waits, except within calls that are counted as waiting
        (reduce, 11, 13),
        ("Memcpy DtoH (Device -> Pinned)", 12, 13),  # no computing
        (reduce, 14, 15),  # after all phases
    ]
    spans = [("forward", 0, 8), ("backward", 8, 13), ("communication", 10, 11), ("send", 13, 15)]
    result = analyze_trace(kernels, spans)
    assert result.hidden_s == 2
    # Of backward's 4 seconds; sending is waiting in itself.
    assert result.waiting == {"forward": 2 / 8, "backward": 3 / 4}
    assert analyze_trace([], spans) == TraceResult(0, {"forward": 0, "backward": 0})


def test_profiler_and_phases_share_a_clock() -> None:
    matrix = torch.randn(600, 600)
    matrix @ matrix
    trace = trace_of_cpu()
    differences = []
    for slow_s in (0.05, 0.2, 0.8):  # the later ones if the machine is busy
        trace.begin()
        assert trace.runs
        with trace.phase("forward"):
            time.sleep(slow_s)
        with trace.phase("backward"):
            began = time.perf_counter()
            matrix @ matrix
            ended = time.perf_counter()
        kernels = trace._kernels(stopped(trace))
        since = trace._since(began), trace._since(ended)
        (begin, end), *_ = [(b, e) for name, b, e in kernels if name == "aten::mm"]
        differences.append((begin - since[0], since[1] - end))
        if all(-slow_s / 10 < off < slow_s / 10 for off in differences[-1]):
            return
    pytest.fail(f"off by {differences}")


def stopped(trace: GpuTrace) -> profile:
    running = trace._profile
    assert running is not None
    running.__exit__(None, None, None)
    trace._profile = None
    return running


def test_step_is_traced_between_two_calls(caplog: pytest.LogCaptureFixture) -> None:
    trace = trace_of_cpu()
    assert trace.end() is None
    for _ in range(2):
        trace.begin()
        with trace.phase("forward"):
            torch.ones(3) + 1
        result = trace.end()
        assert not trace.runs
        assert result == TraceResult(0, {"forward": 0})  # no kernel of NCCL here
    with trace.phase("forward"):  # of no traced step
        pass
    assert trace.end() is None
    assert not caplog.records


QUIET = """
import os
from tests.extensions.profiler.test_trace import trace_of_cpu
for _ in range(2):
    trace = trace_of_cpu()
    trace.begin()
    assert trace.runs
    trace.end()
    assert "KINETO_LOG_LEVEL" not in os.environ
"""


def test_profiler_library_is_quiet() -> None:
    # It logs only on its first use in a process.
    command = [sys.executable, "-c", QUIET]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (completed.stdout, completed.stderr) == ("", "")


def test_user_profiler_has_priority() -> None:
    trace = trace_of_cpu()
    now_and_then = schedule(wait=1, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=now_and_then) as waiting:
        for _ in range(3):
            trace.begin()
            assert not trace.runs
            assert trace.end() is None
            torch.ones(3) + 1
            waiting.step()
    assert any(event.name == "aten::ones" for event in waiting.events() or ())
    trace.begin()
    assert trace.runs
    trace.end()


def test_kernels_are_relative_to_the_anchor() -> None:
    now = 1_790_000_000_000_000_000  # since 1970: a float is 256 from the next

    class Event:
        def __init__(
            self,
            name: str,
            start: int,
            end: int,
            kind: DeviceType = DeviceType.CUDA,
            annotates: bool = False,
        ) -> None:
            self.name = lambda: name
            self.start_ns, self.end_ns = lambda: now + start, lambda: now + end
            self.device_type, self.is_user_annotation = lambda: kind, lambda: annotates

    class Running:  # as torch's, after it has stopped
        profiler = kineto_results = property(lambda self: self)

        def events(self) -> list[Event]:
            return [
                Event("gemm", 2510, 4020),
                Event("add", 1000, 2000),
                Event("Memcpy HtoD (Pinned -> Device)", 500, 900),
                Event("nccl:all_gather", 400, 9000, annotates=True),
                Event("cudaLaunchKernel", 450, 490, DeviceType.CPU),
            ]

    kernels = GpuTrace(CPU, kind=DeviceType.CUDA, clock=HostClock())._kernels(Running())
    assert kernels == [
        ("Memcpy HtoD (Pinned -> Device)", pytest.approx(-1.5e-6), pytest.approx(-1.1e-6)),
        ("gemm", pytest.approx(5.1e-7), pytest.approx(2.02e-6)),
    ]


def test_pending_device_work_belongs_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Played):
        def _wait(self) -> None:
            nonlocal now
            now += 10  # the host was ahead of it

        def _kernels(self, trace: profile) -> list[Span]:
            nonlocal now
            now += 3
            return super()._kernels(trace)

    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr("zerotrial.extensions.profiler.trace.time", clock)
    breakdown = Breakdown(CPU, 2)
    breakdown._overlap, breakdown._trace = None, Slow()
    breakdown.restart()
    with breakdown.phase("forward"):
        pass
    assert breakdown.end_trace() == 3
    assert now == 23
    assert breakdown.end_trace() == 0


@pytest.mark.parametrize("how", ["dropped", "gone", "broken"])
def test_unfinished_trace_frees_the_profiler(how: str) -> None:
    trace = trace_of_cpu()
    if how == "broken":
        trace._marker = None  # nothing can be added to it
    trace.begin()
    if how == "dropped":
        assert trace.runs
        trace.drop()
    assert not trace.runs or how == "gone"
    assert trace.missing == ("torch's profiler cannot trace this device" * (how == "broken"))
    del trace
    assert not torch._C._autograd._profiler_enabled()
    other = trace_of_cpu()
    other.begin()
    assert other.runs
    assert other.end() == TraceResult(0, {})


def test_endless_step_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of_cpu()
    trace.begin()
    with trace.phase("forward"):
        monkeypatch.setattr("zerotrial.extensions.profiler.trace._LONGEST_S", 0.0)
        with ThreadPoolExecutor(1) as pool:  # as autograd does
            pool.submit(trace.phase("communication").__enter__).result()
        assert trace.runs
        with trace.phase("communication"):
            assert not trace.runs
    assert not torch._C._autograd._profiler_enabled()
    assert trace.end() is None
    assert trace.missing == "a step that takes longer than 0 s is not traced"
    trace.begin()  # it may have been an evaluation
    assert trace.runs
    with trace.phase("forward"):
        assert not trace.runs
    trace.begin()  # but not again and again
    assert not trace.runs
    assert trace.missing == "a step that takes longer than 0 s is not traced"


def test_training_continues_if_tracing_fails(caplog: pytest.LogCaptureFixture) -> None:
    # A profiler that sees no GPU, as if the driver forbade it.
    trace = GpuTrace(CPU, ProfilerActivity.CPU, DeviceType.CUDA, HostClock())
    with caplog.at_level(logging.WARNING, "zerotrial.engine"):
        for _ in range(3):
            trace.begin()
            with trace.phase("forward"):
                pass
            assert trace.end() is None
    (record,) = caplog.records
    assert (
        "cannot trace this device (the profiler has seen nothing of the device)" in record.message
    )


class Played(GpuTrace):
    """Fake trace of a GPU."""

    def __init__(self) -> None:
        super().__init__(CPU, ProfilerActivity.CPU, DeviceType.CPU, HostClock())

    def end(self) -> TraceResult | None:
        return super().end() and TraceResult(0.02, {"forward": 0.75, "backward": 0.5})


def test_traced_waiting_counts_as_communication() -> None:
    breakdown = Breakdown(CPU, 2)
    breakdown._overlap, breakdown._trace = None, Played()

    def step(evaluates: bool = False) -> float:
        if evaluates:
            with breakdown.phase("evaluation"):
                assert not breakdown._trace.runs
        with breakdown.phase("forward"):
            time.sleep(0.04)
        with breakdown.phase("backward"):
            time.sleep(0.08)
        return breakdown.end_trace()

    breakdown.restart()
    began = time.perf_counter()
    assert step(evaluates=True) > 0
    assert step() == 0
    seconds = (time.perf_counter() - began) / 2
    text = breakdown.line(seconds, 2)
    shares = breakdown.shares
    hidden = shares.pop("hidden_communication_share")
    assert sum(shares.values()) == pytest.approx(1)
    # A quarter of forward is its own, and half of backward.
    waited = 3 * shares["forward_share"] + shares["backward_share"]
    assert shares["communication_share"] == pytest.approx(waited)
    assert hidden == pytest.approx(0.02 / max(seconds, 0.12), rel=0.5)
    assert "; communication hidden behind them 20.00 ms (" in text

    breakdown.restart()  # the trace is not old
    assert step() == 0
    breakdown.line(0.12, 1)
    assert breakdown.shares["hidden_communication_share"] > 0

    breakdown._trace_result = None  # as where nothing was traced
    breakdown.restart()
    step()
    breakdown.line(0.12, 1)
    assert "hidden_communication_share" not in breakdown.shares
    assert breakdown.shares["communication_share"] == 0


def test_zero_hidden_communication_is_reported() -> None:
    breakdown = Breakdown(CPU, 2)
    expected = "; communication hidden behind them 0.00 ms (0%)"
    assert expected not in breakdown.line(1.0, 1)  # nothing communicates
    with breakdown.phase("communication"):
        breakdown.under_way(1)
        breakdown.under_way(-1)
    for _ in range(2):
        assert breakdown.line(1.0, 1).endswith(expected)
        assert breakdown.shares["hidden_communication_share"] == 0
    breakdown._overlap, breakdown._trace = None, trace_of_cpu()
    assert expected not in breakdown.line(1.0, 1)  # nothing was traced yet
    breakdown.restart()
    with breakdown.phase("forward"):
        pass
    breakdown.end_trace()
    assert breakdown.line(1.0, 1).endswith(expected)


def test_two_engines_are_traced_in_turn() -> None:
    traced: dict[str, list[int]] = {"actor": [], "critic": []}
    engines = {}
    for name in traced:
        engines[name], *_ = zerotrial.initialize(model=Square(), config=watched())
        engines[name].observer._breakdown._trace = Played()
        engines[name].observer._breakdown._overlap = None

    for step in range(1, STEPS + 1):
        losses = {
            name: engine(torch.ones(1, 4), torch.ones(1, 1)) for name, engine in engines.items()
        }
        for name, engine in engines.items():
            engine.backward(losses[name])
            if engine.observer._breakdown._trace.runs:
                traced[name].append(step)
            engine.step()
    # Each traces a full step, although the critic's profiler is free in mid-step.
    assert traced == {"actor": [2], "critic": [3]}
    for engine in engines.values():
        assert engine.observer.measured["hidden_communication_share"] > 0
        engine.close()


def test_missing_trace_has_a_reason() -> None:
    breakdown = Breakdown(CPU, 2)
    breakdown._overlap, breakdown._trace = None, Played()
    breakdown.restart()
    with profile(activities=[ProfilerActivity.CPU]):
        for _ in range(2):
            with breakdown.phase("forward"):
                pass
            breakdown.end_trace()
    reason = "; NCCL communication is unknown: another torch profiler is active"
    assert breakdown.line(1.0, 2).endswith(reason)
    breakdown.restart()
    with breakdown.phase("forward"):
        pass
    breakdown.end_trace()
    assert "not known" not in breakdown.line(1.0, 1)


def test_trace_starts_with_a_step_not_validation() -> None:
    breakdown = Breakdown(CPU, 2)
    breakdown._overlap, breakdown._trace = None, Played()
    breakdown.restart()
    with breakdown.phase("input"):  # there was no more
        pass
    with breakdown.phase("evaluation"), breakdown.phase("communication"):  # as stage 3 gathers
        assert not breakdown._trace.runs
    with breakdown.phase("forward"), breakdown.phase("communication"):
        assert breakdown._trace.runs
    breakdown.drop_trace()
    assert not breakdown._trace.runs


def test_at_most_every_ninth_step_is_traced() -> None:
    engine, *_ = zerotrial.initialize(model=Square(), config=watched())
    trace = engine.observer._breakdown._trace = Played()
    engine.observer._breakdown._overlap = None
    traced = []

    def train() -> None:
        loss = engine(torch.ones(1, 4), torch.ones(1, 1))
        engine.backward(loss)
        traced.append(trace.runs)
        engine.step()
        assert not trace.runs

    for _ in range(4 * STEPS + 1):
        train()
        if len(traced) in (STEPS, 2 * STEPS):  # with the same trace
            measured = engine.observer.measured
            assert measured["hidden_communication_share"] > 0
            assert measured["communication_share"] > 0
    # not the first, which warms up, but the second, and one at least nine later
    assert [step for step, runs in enumerate(traced, 1) if runs] == [2, 4 * STEPS + 1]
    breakdown = engine.observer._breakdown
    breakdown._has_traced, breakdown._is_due = False, True

    with torch.no_grad():
        engine(torch.ones(1, 4), torch.ones(1, 1))
    assert not trace.runs  # a validation is of no step
    engine(torch.ones(1, 4), torch.ones(1, 1))
    assert trace.runs
    engine.close()
    assert not trace.runs
    assert not torch._C._autograd._profiler_enabled()
