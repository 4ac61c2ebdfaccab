"""The trial loop's view of a wrapped engine."""

from torch import nn

import zerotrial
from zerotrial.engine_view import view_of


def test_view_ignores_attributes_of_the_model() -> None:
    model = nn.Linear(1, 1)
    model.is_pipe_parallel = True  # type: ignore[assignment]
    model.tensor_parallel_size = 2  # type: ignore[assignment]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = zerotrial.initialize(model=model, config=config)
    view = view_of(engine)
    assert not view.is_pipeline
    assert not view.forward_is_collective
    assert view.numbers() == {
        "learning_rate": 1e-3, "loss_scale": 1.0, "skipped_steps": 0.0
    }  # fmt: skip
    engine.close()
