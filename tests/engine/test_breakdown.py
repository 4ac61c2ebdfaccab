"""Where the time of a step goes: what is made slow on purpose has most of it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.pipelines import MICRO, SAMPLES, Block, batches, engine_of
from tests.engine.ranks import run_on_ranks
from zerotrial.engine.watch.breakdown import Overlap

SLOW_S = 0.1
"""More than all else that a step of these models takes, many times."""

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


def watched(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.8}},
        "steps_per_print": STEPS,
        "wall_clock_breakdown": True,
        **more,
    }


def shares(measured: Any) -> dict[str, float]:
    """Those that add up to one."""
    found = {
        name.removesuffix("_share"): float(value)
        for name, value in measured.items()
        if name.endswith("_share")
    }
    assert 0 <= found.pop("hidden_communication", 0.0) < 1
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) >= 0
    return found


@pytest.mark.parametrize("loop", ["train_batch", "loader"])
def test_a_slow_loader_has_most_of_a_step(loop: str) -> None:
    engine, _, loader, _ = zerotrial.initialize(
        model=Square(), training_data=Rows(SLOW_S), config=watched()
    )
    if loop == "train_batch":
        for _ in range(STEPS):
            engine.train_batch()
    else:
        for batch, _ in zip(loader, range(STEPS), strict=False):
            engine.backward(engine(*batch))
            engine.step()
    found = shares(engine.observer.measured)
    assert found["input"] > sum(found.values()) / 2
    assert engine.observer.measured["step_seconds"] > SLOW_S
    assert engine.observer.measured["momentum"] == pytest.approx(0.8)
    engine.close()


def test_a_slow_forward_has_most_of_a_step_and_evaluation_counts_apart() -> None:
    engine, *_ = zerotrial.initialize(model=Square(SLOW_S), config=watched())
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
        engine.step()
    found = shares(engine.observer.measured)
    assert found["forward"] > sum(found.values()) / 2
    assert "evaluation" not in found
    for _ in range(STEPS):
        with torch.no_grad():
            for _ in range(3):
                engine(torch.ones(1, 4), torch.ones(1, 1))
        engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
        engine.step()
    found = shares(engine.observer.measured)
    assert found["evaluation"] > found["forward"]
    engine.close()


def test_nothing_is_timed_unless_the_file_asks() -> None:
    for config in (watched(wall_clock_breakdown=False), watched(steps_per_print=None)):
        engine, *_ = zerotrial.initialize(model=Square(), config=config)
        timed = bool(config["wall_clock_breakdown"])
        assert engine.observer.times_phases is timed
        engine.close()


def wait_for_a_slow_rank(stage: int) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    zero = {"stage": stage}
    engine, *_ = zerotrial.initialize(
        model=Square(4 * SLOW_S * rank), config=watched(zero_optimization=zero)
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 4), torch.ones(1, 1)))
        engine.step()
    measured = dict(engine.observer.measured)
    engine.close()
    return measured


def wait_at_each_stage() -> list[dict[str, float]]:
    return [wait_for_a_slow_rank(stage) for stage in (0, 1, 2, 3)]


@pytest.mark.processes
def test_waiting_for_a_slow_rank_is_communication_at_every_stage() -> None:
    first, second = run_on_ranks(wait_at_each_stage, 2)
    assert second == [{}] * 4  # rank 0 alone measures
    for stage, measured in enumerate(first):
        found = shares(measured)
        assert found["communication"] > sum(found.values()) / 2, stage


def slow(data: Iterator[Any]) -> Iterator[Any]:
    for each in data:
        time.sleep(SLOW_S)
        yield each


def pipeline_shares(schedule: str, chunks: int, *, slow_input: bool) -> dict[str, float]:
    more = {"steps_per_print": STEPS, "wall_clock_breakdown": True}
    engine = engine_of(2, 1, schedule, chunks, **more)
    last = engine.is_last_stage()
    for module in engine.module.modules() if last and not slow_input else ():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S / 4))
    for step in range(STEPS):
        data = batches(step, engine)
        engine.train_batch(slow(data) if slow_input and not last else data)
    measured = dict(engine.observer.measured)
    engine.close()
    return measured


def pipelines() -> list[dict[str, float]]:
    return [
        pipeline_shares("1f1b", 1, slow_input=False),
        pipeline_shares("1f1b", 1, slow_input=True),
        pipeline_shares("zero-bubble", 1, slow_input=False),
    ]


@pytest.mark.processes
def test_a_pipeline_tells_sending_receiving_and_tied_gradients_apart() -> None:
    assert SAMPLES // MICRO > 2
    first, second = run_on_ranks(pipelines, 2)
    assert second == [{}] * 3
    waiting, reading, split = (shares(measured) for measured in first)
    for found in (waiting, reading, split):
        assert {"send", "receive", "tied_gradients", "input", "communication"} <= set(found)
    assert waiting["receive"] > sum(waiting.values()) / 2
    assert reading["input"] > sum(reading.values()) / 2
    assert split["receive"] > split["send"]


def test_what_is_hidden_is_the_time_under_way_outside_the_calls() -> None:
    now = 0.0
    overlap = Overlap(lambda: now)

    def at(moment: float, **change: int) -> None:
        nonlocal now
        now = moment
        overlap.change(**change)

    at(1, inside=1)
    at(2, under_way=1)  # started
    at(3, inside=-1)
    at(5, under_way=1)  # another, which makes no difference
    at(7, inside=1)  # waits
    at(10, under_way=-1)
    at(11, under_way=-1)
    at(12, inside=-1)
    now = 20
    assert overlap.take() == 7 - 3
    assert overlap.take() == 0
