"""Breakdown of step time: a part made slow on purpose dominates it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.pipelines import MICRO, SAMPLES, Block, batches, engine_of
from tests.engine.ranks import run_on_ranks
from zerotrial.extensions.profiler.breakdown import Overlap

SLOWER_S = (0.1, 0.5, 2.5, 2.5, 2.5)
"""Each more than all else that a step takes; the later ones where the machine is busy, or stood
still in the earlier ones."""

STEPS = 3


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._slow_s)
        return torch.full((4,), float(index)), torch.zeros(1)


class Square(nn.Module):
    def __init__(self, slow_s: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._slow_s = slow_s

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(self._slow_s)
        loss: Tensor = (self.layer(x) - y).square().mean()
        return loss


def in_the_end(
    has_most: Callable[[dict[str, float]], bool], measure: Callable[[float], dict[str, float]]
) -> None:
    """Assert a condition, with growing delays until it holds."""
    measured = {}
    for slow_s in SLOWER_S:
        measured = measure(slow_s)
        if has_most(measured):
            return
    pytest.fail(f"after {SLOWER_S[-1]} s: {measured}")


def most(name: str) -> Callable[[dict[str, float]], bool]:
    return lambda item: item[name] > sum(item.values()) / 2


def watched(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.8}},
        "steps_per_print": STEPS,
        "wall_clock_breakdown": True,
        **more,
    }


def shares(measured: Any) -> dict[str, float]:
    """Return the shares that add up to one."""
    result = {
        name.removesuffix("_share"): float(value)
        for name, value in measured.items()
        if name.endswith("_share")
    }
    assert 0 <= result.pop("hidden_communication", 0.0) <= 1
    assert sum(result.values()) == pytest.approx(1.0)
    assert min(result.values()) >= 0
    return result


@pytest.mark.parametrize("loop", ["train_batch", "loader"])
def test_slow_loader_dominates_the_step(loop: str) -> None:
    def measure(slow_s: float) -> dict[str, float]:
        engine, _, loader, _ = zerotrial.initialize(
            model=Square(), training_data=Rows(slow_s), config=watched()
        )
        if loop == "train_batch":
            for _ in range(STEPS):
                engine.train_batch()
        else:
            for batch, _ in zip(loader, range(STEPS), strict=False):
                engine.backward(engine(*batch))
                engine.step()
        measured = engine.observer.measured
        assert measured["step_seconds"] > slow_s
        assert measured["momentum"] == pytest.approx(0.8)
        engine.close()
        return shares(measured)

    in_the_end(most("input"), measure)


def test_slow_forward_dominates_the_step() -> None:
    def measure(slow_s: float) -> dict[str, float]:
        engine, *_ = zerotrial.initialize(model=Square(slow_s), config=watched())
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
            engine.step()
        measured = engine.observer.measured
        engine.close()
        return shares(measured)

    in_the_end(lambda item: most("forward")(item) and "evaluation" not in item, measure)


def test_evaluation_is_separate() -> None:
    def measure(slow_s: float) -> dict[str, float]:
        engine, *_ = zerotrial.initialize(model=Square(slow_s), config=watched())
        for _ in range(STEPS):
            with torch.no_grad():
                for _ in range(3):
                    engine(torch.ones(1, 4), torch.ones(1, 1))
            engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
            engine.step()
        measured = engine.observer.measured
        engine.close()
        return shares(measured)

    in_the_end(lambda item: item["evaluation"] > item["forward"] > 0, measure)


def test_no_timing_by_default() -> None:
    for config in (watched(wall_clock_breakdown=False), watched(steps_per_print=None)):
        engine, *_ = zerotrial.initialize(model=Square(), config=config)
        timed = bool(config["wall_clock_breakdown"])
        assert engine.observer.times_phases is timed
        engine.close()


def wait_for_a_slow_rank(stage: int, slow_s: float) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    zero = {"stage": stage}
    engine, *_ = zerotrial.initialize(
        model=Square(4 * slow_s * rank), config=watched(zero_optimization=zero)
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
        engine.step()
    measured = dict(engine.observer.measured)
    engine.close()
    return measured


def waits_by_stage(slow_s: float) -> list[dict[str, float]]:
    return [wait_for_a_slow_rank(stage, slow_s) for stage in (0, 1, 2, 3)]


@pytest.mark.processes
def test_waiting_for_slow_rank_is_communication() -> None:
    def measure(slow_s: float) -> dict[str, float]:
        first, second = run_on_ranks(waits_by_stage, 2, slow_s)
        assert second == [{}] * 4  # rank 0 alone measures
        # However short: between the start of a collective and the call that waits for it.
        # At stage 3 both ranks arrive at the same time, so a collective may end at once.
        assert all(measured["hidden_communication_share"] > 0 for measured in first[:3])
        candidates = [shares(measured) for measured in first]
        return min(candidates, key=lambda item: item["communication"])

    in_the_end(most("communication"), measure)


def slow(data: Iterator[Any], slow_s: float) -> Iterator[Any]:
    for item in data:
        time.sleep(slow_s)
        yield item


def pipeline_shares(schedule: str, slow_s: float, *, slow_input: bool) -> dict[str, float]:
    more = {"steps_per_print": STEPS, "wall_clock_breakdown": True}
    engine = engine_of(2, 1, schedule, 1, **more)
    last = engine.is_last_stage()
    for module in engine.module.modules() if last and not slow_input else ():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: time.sleep(slow_s / 4))
    for step in range(STEPS):
        data = batches(step, engine)
        engine.train_batch(slow(data, slow_s) if slow_input and not last else data)
    measured = dict(engine.observer.measured)
    engine.close()
    return measured


def pipelines(slow_s: float) -> list[dict[str, float]]:
    return [
        pipeline_shares("1f1b", slow_s, slow_input=False),
        pipeline_shares("1f1b", slow_s, slow_input=True),
        pipeline_shares("zero-bubble", slow_s, slow_input=False),
    ]


@pytest.mark.processes
def test_pipeline_send_receive_and_tied_gradients() -> None:
    assert SAMPLES // MICRO > 2
    for slow_s in SLOWER_S:
        first, second = run_on_ranks(pipelines, 2, slow_s)
        assert second == [{}] * 3
        waiting, reading, split = (shares(measured) for measured in first)
        for item in (waiting, reading, split):
            assert {"send", "receive", "tied_gradients", "input", "communication"} <= set(item)
        dominated = most("receive")(waiting) and most("input")(reading)
        if dominated and split["receive"] > split["send"]:
            return
    pytest.fail(f"after {SLOWER_S[-1]} s: {first}")


def test_hidden_time_is_in_progress_outside_calls() -> None:
    now = 0.0
    overlap = Overlap(lambda: now)

    def at(moment: float, **change: int) -> None:
        nonlocal now
        now = moment
        overlap.change(**change)

    at(1, inside=1)
    at(2, under_way=1)  # started
    at(3, inside=-1)
    at(5, under_way=1)  # another value without effect
    at(7, inside=1)  # waits
    at(10, under_way=-1)
    at(11, under_way=-1)
    at(12, inside=-1)
    now = 20
    assert overlap.take() == 7 - 3
    assert overlap.take() == 0
