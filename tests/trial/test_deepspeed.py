"""An engine of a real DeepSpeed, where one is installed, in our loop."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.trial.helpers import LineTrial, fit, last_checkpoint, make_settings, make_spec, metrics

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is an extra; it needs a compiler")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


class DeepSpeedTrial(LineTrial):
    def __init__(self, context: Any) -> None:
        self.context = context
        self.samples, self.seen = 22, []
        model = nn.Linear(1, 1)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=CONFIG
        )
        self.engine = context.wrap_model_engine(engine)

    def loss(self, batches: Iterator[Any]) -> Any:
        x, y, _ = next(batches)
        return (self.engine(x.bfloat16()).float() - y).square().mean()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter):
        return {"validation_loss": self.loss(dataloader_iter)}


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**here, "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_deepspeed_engine_trains_is_recorded_and_goes_on(tmp_path: Path) -> None:
    fit(make_spec(tmp_path), DeepSpeedTrial, make_settings(4))
    latest = last_checkpoint(tmp_path)
    fit(make_spec(tmp_path, latest=latest), DeepSpeedTrial, make_settings(6))
    training = metrics(tmp_path, "training")
    assert sorted(training) == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "loss_scale"} <= set(training[6])
    assert training[6]["loss"] < training[1]["loss"]
