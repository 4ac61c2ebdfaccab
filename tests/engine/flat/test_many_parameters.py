"""Models of thousands of parameters (adapters, experts): work grows with their number only."""

import cProfile
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from zerotrial.engine.memory.heap import garbage_collection_paused

FEW, TIMES = 400, 4
LIMIT = 5.0
"""Four times as many parameters take sixteen times as many calls where work is quadratic."""


def chain(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(parameters)])


def calls(action: Callable[[], Any]) -> int:
    """Return the number of function calls of an action, which does not depend on the machine."""
    profile = cProfile.Profile()
    profile.runcall(action)
    return sum(entry.callcount for entry in profile.getstats())


def measured(stage: int, optimizer: str, parameters: int) -> dict[str, int]:
    model = chain(parameters)
    engines: list[Any] = []
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }

    def build() -> None:
        engines.append(zerotrial.initialize(model=model, config=config)[0])

    counts = {"build": calls(build)}
    (engine,) = engines
    counts["tensors_by_kind"] = calls(engine.stage.tensors_by_kind)
    counts["pieces"] = calls(lambda: list(engine.stage.pieces()))
    counts["close"] = calls(engine.close)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer"), [(0, "LAMB"), (2, "AdamW"), (3, "AdamW")])
def test_work_grows_linearly_with_parameters(stage: int, optimizer: str) -> None:
    measured(stage, optimizer, 10)  # imports
    gc.collect()
    gc.disable()  # its own calls are not counted
    try:
        few, many = (measured(stage, optimizer, count) for count in (FEW, TIMES * FEW))
    finally:
        gc.enable()
    for what, small in few.items():
        assert many[what] < LIMIT * small, f"{what}: {small} calls for {FEW}, {many[what]}"


def test_garbage_collector_is_paused_during_build() -> None:
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
    with garbage_collection_paused(), garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
