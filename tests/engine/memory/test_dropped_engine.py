"""An engine that is dropped without ``close()`` gives its memory back."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from zerotrial.engine import initialize


def train_and_drop(stage: int, precision: dict[str, Any]) -> list["weakref.ref[Any]"]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **precision,
    }
    engine = initialize(model=model, config=config)[0]
    engine.backward(engine(torch.randn(2, 4)).float().mean())
    engine.step()
    return [weakref.ref(model), weakref.ref(engine), *map(weakref.ref, model.parameters())]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_dropped_engine_is_freed(stage: int, precision: dict[str, Any]) -> None:
    references = train_and_drop(stage, precision)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
