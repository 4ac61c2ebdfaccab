"""Engine without extensions: training, checkpoints and full weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import zerotrial
from tests.engine.models import CLASSES, FEATURES, TinyModel
from zerotrial.engine.builder import build
from zerotrial.engine.engine import Engine


@pytest.fixture(autouse=True)
def without_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "EXTENSIONS", {})
    monkeypatch.setattr(build, "_extended", {})


def make_engine(stage: int, **keys: Any) -> Engine:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    engine, *_ = zerotrial.initialize(model=TinyModel(), config=config)
    assert not hasattr(engine, "save_checkpoint")
    return engine


def train(engine: Engine, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2 * steps):
        inputs = torch.randn(2, FEATURES, generator=generator)
        targets = torch.randint(CLASSES, (2,), generator=generator)
        engine.backward(cross_entropy(engine(inputs), targets))
        engine.step()


@pytest.mark.needs_extension("full_weights")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_equals_training_without_stop(stage: int, tmp_path: Path) -> None:
    engine = make_engine(stage)
    train(engine, 2, seed=1)
    assert (engine.progress.global_steps, engine.progress.micro_steps) == (2, 4)
    assert engine.progress.updated
    assert engine.progress.grad_norm
    engine.checkpoint.save(tmp_path)
    train(engine, 1, seed=2)
    expected = engine.weights.full_state_dict()
    engine.close()
    resumed = make_engine(stage)
    assert resumed.checkpoint.load(tmp_path) == (str(tmp_path / "global_step2"), {})
    train(resumed, 1, seed=2)
    actual = resumed.weights.full_state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
