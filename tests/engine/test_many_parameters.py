"""Models of thousands of parameters (adapters, experts): time grows with their number only."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from zerotrial.engine.memory.heap import uncollected

FEW, TIMES = 400, 4
LIMIT = 9.0
"""Four times as many parameters would take sixteen times as long where time is quadratic."""


def chain(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(parameters)])


def cpu_seconds(action: Callable[[], Any]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def measured(stage: int, optimizer: str, parameters: int) -> dict[str, float]:
    model = chain(parameters)
    engines: list[Any] = []
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }

    def build() -> None:
        engines.append(zerotrial.initialize(model=model, config=config)[0])

    found = {"build": cpu_seconds(build)}
    (engine,) = engines
    found["held"] = cpu_seconds(engine.stage.held)
    found["pieces"] = cpu_seconds(lambda: list(engine.stage.pieces()))
    found["close"] = cpu_seconds(engine.close)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_time_grows_with_the_number_of_parameters_and_no_faster(stage: int, optimizer: str) -> None:
    measured(stage, optimizer, 10)  # imports
    gc.collect()
    gc.disable()  # its passes over a growing heap are torch's and python's matter
    try:
        few = [measured(stage, optimizer, FEW) for _ in range(3)]
        many = [measured(stage, optimizer, TIMES * FEW) for _ in range(2)]
    finally:
        gc.enable()
    for what in few[0]:
        small = max(min(run[what] for run in few), 0.002)  # below, the clock is too coarse
        large = min(run[what] for run in many)
        assert large < LIMIT * small, f"{what}: {small:.3f} s for {FEW}, {large:.3f} s"


def test_the_collector_does_not_run_while_an_engine_is_built_and_is_left_as_it_was() -> None:
    seen: list[bool] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.append(gc.isenabled())
        return torch.optim.SGD(parameters, lr=0.1)

    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = zerotrial.initialize(model=chain(2), optimizer=make, config=config)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    engine.close()
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
