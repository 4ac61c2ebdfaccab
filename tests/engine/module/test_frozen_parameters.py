"""Parameters unfrozen after ``initialize`` are not trained and cause a warning."""

from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from zerotrial.engine.module.frozen_parameters import FrozenParameters

STAGES = (0, 1, 2, 3)


def engine_of(model: nn.Module, stage: int, **arguments: Any) -> Any:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return zerotrial.initialize(model=model, config=config, **arguments)[0]


def two_layers(frozen: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[frozen].requires_grad_(requires_grad=False)
    return model


def train(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "not trained" in r.getMessage()]


@pytest.mark.parametrize("stage", STAGES)
def test_unfrozen_parameter_is_named_once(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    model = two_layers(frozen=0)
    engine = engine_of(model, stage)
    train(engine)
    assert warnings(caplog) == []
    model[0].requires_grad_(requires_grad=True)
    train(engine, 3)
    (line,) = warnings(caplog)
    assert line.startswith("not trained: 0.weight, 0.bias: frozen when the engine was built")
    again = engine_of(model, stage)
    before = model[0].weight.detach().clone()
    train(again)
    assert not torch.equal(before, model[0].weight)
    assert len(warnings(caplog)) == 1
    again.close()


def test_parameters_of_another_engine_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    model = two_layers(frozen=1)
    first = engine_of(model, 1)
    model[1].requires_grad_(requires_grad=True)
    second = engine_of(model, 1, model_parameters=model[1].parameters())
    train(first)
    assert warnings(caplog) == []
    first.close()
    second.close()


def test_check_covers_all_parameters_in_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(200))
    model.requires_grad_(requires_grad=False)
    frozen = FrozenParameters(model, lambda: ())
    model[150].requires_grad_(requires_grad=True)
    for looks in range(4):
        assert len(warnings(caplog)) == (looks > 2)
        frozen.check()
    (line,) = warnings(caplog)
    assert "150.weight" in line
