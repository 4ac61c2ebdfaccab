"""What a traced step shows: communication that runs beside computing, and phases that wait for it.

A GPU's kernels are played here; torch's profiler is real. What a GPU shows itself is in
``tests/trial/test_on_gpu.py``.
"""

import logging
import os
import time
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

import zerotrial
from tests.engine.watch.test_breakdown import STEPS, Square, watched
from zerotrial.engine.watch.breakdown import Breakdown
from zerotrial.engine.watch.timers import HostClock
from zerotrial.engine.watch.trace import Behind, GpuTrace, behind, innermost

CPU = torch.device("cpu")


def trace_of_cpu() -> GpuTrace:
    return GpuTrace(CPU, ProfilerActivity.CPU, DeviceType.CPU, HostClock())


def test_the_time_of_a_phase_is_without_those_inside() -> None:
    spans = [("a", 0, 10), ("b", 1, 3), ("b", 3, 4), ("c", 6, 9), ("b", 7, 8), ("a", 12, 13)]
    assert innermost(spans) == {
        "a": [(0, 1), (4, 6), (9, 10), (12, 13)],
        "b": [(1, 3), (3, 4), (7, 8)],
        "c": [(6, 7), (8, 9)],
    }
    assert innermost([]) == {}


def test_a_kernel_of_nccl_is_hidden_where_another_computes_and_else_waited_for() -> None:
    gather, reduce = "ncclDevKernel_AllGather_RING_LL(args)", "ncclKernel_ReduceScatter"
    kernels = [
        (gather, 0, 4),  # forward waits for 2, then computes behind it
        ("gemm", 2, 9),
        ("gemm", 3, 5),  # in a second stream: the same time once more
        (reduce, 9, 12),  # backward waits, but for what the call itself says to be waiting
        (reduce, 11, 13),
        ("Memcpy DtoH (Device -> Pinned)", 12, 13),  # no computing
        (reduce, 14, 15),  # after all phases
    ]
    spans = [("forward", 0, 8), ("backward", 8, 13), ("communication", 10, 11), ("send", 13, 15)]
    found = behind(kernels, spans)
    assert found.hidden_s == 2
    # Of backward's 4 seconds; sending is waiting in itself.
    assert found.waiting == {"forward": 2 / 8, "backward": 3 / 4}
    assert behind([], spans) == Behind(0, {"forward": 0, "backward": 0})


def test_the_profilers_clock_and_that_of_the_phases_are_one() -> None:
    one = torch.randn(600, 600)
    one @ one
    trace = trace_of_cpu()
    found = []
    for slow_s in (0.05, 0.2, 0.8):  # the later ones where the machine is busy
        trace.begin()
        assert trace.runs
        with trace.phase("forward"):
            time.sleep(slow_s)
        with trace.phase("backward"):
            began = time.perf_counter()
            one @ one
            ended = time.perf_counter()
        kernels = trace._kernels(stopped(trace))
        since = trace._since(began), trace._since(ended)
        (begin, end), *_ = [(b, e) for name, b, e in kernels if name == "aten::mm"]
        found.append((begin - since[0], since[1] - end))
        if all(-slow_s / 10 < off < slow_s / 10 for off in found[-1]):
            return
    pytest.fail(f"off by {found}")


def stopped(trace: GpuTrace) -> profile:
    running = trace._profile
    assert running is not None
    running.__exit__(None, None, None)
    trace._profile = None
    return running


def test_a_step_is_traced_between_two_calls(caplog: pytest.LogCaptureFixture) -> None:
    trace = trace_of_cpu()
    assert trace.end() is None
    for _ in range(2):
        trace.begin()
        with trace.phase("forward"):
            torch.ones(3) + 1
        found = trace.end()
        assert not trace.runs
        assert found == Behind(0, {"forward": 0})  # no kernel of NCCL here
    with trace.phase("forward"):  # of no traced step
        pass
    assert trace.end() is None
    assert not caplog.records


def test_the_profilers_library_is_quiet(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = dict(os.environ)
    trace = trace_of_cpu()
    trace.begin()
    trace.end()
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")


def test_a_profiler_of_the_users_goes_first() -> None:
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


def test_training_goes_on_where_nothing_can_be_traced(caplog: pytest.LogCaptureFixture) -> None:
    # A profiler that sees no GPU, as where the driver forbids it.
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
    """Sees what a GPU might have shown."""

    def __init__(self) -> None:
        super().__init__(CPU, ProfilerActivity.CPU, DeviceType.CPU, HostClock())

    def end(self) -> Behind | None:
        return super().end() and Behind(0.02, {"forward": 0.75, "backward": 0.5})


def test_what_a_phase_waited_is_communication_and_what_was_hidden_comes_besides() -> None:
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

    breakdown.restart()  # and an interval that nothing was traced in
    breakdown._is_due = False
    step()
    breakdown.line(0.12, 1)
    assert "hidden_communication_share" not in breakdown.shares
    assert breakdown.shares["communication_share"] == 0


def test_an_engine_has_one_step_of_each_interval_traced() -> None:
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

    for _ in range(3 * STEPS):
        train()
    # not the very first, which warms up, but the first after it and after each line
    assert [step for step, runs in enumerate(traced, 1) if runs] == [2, STEPS + 1, 2 * STEPS + 1]
    measured = engine.observer.measured
    assert measured["hidden_communication_share"] > 0
    assert measured["communication_share"] > 0

    with torch.no_grad():
        engine(torch.ones(1, 4), torch.ones(1, 1))
    assert not trace.runs  # a validation is of no step
    engine(torch.ones(1, 4), torch.ones(1, 1))
    assert trace.runs
    engine.close()
    assert not trace.runs
    assert not torch._C._autograd._profiler_enabled()
