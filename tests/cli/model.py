"""A model that trains very fast, for tests."""

from typing import Any

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zerotrial


def points():
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return TensorDataset(x, 3 * x + 1)


class Line(zerotrial.ZeroTrial):
    def __init__(self, context):
        self.context = context
        config = context.get_hparam("deepspeed_config")
        engine, *_ = zerotrial.initialize(model=nn.Linear(1, 1), config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        x, y = self.context.to_device(next(dataloader_iter))
        loss = (self.engine(x) - y).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter):
        x, y = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": (self.engine(x) - y).square().mean()}

    def build_training_data_loader(self):
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(points(), batch_size=size, shuffle=True)

    def build_validation_data_loader(self):
        return zerotrial.DataLoader(points(), batch_size=64)
"""

ENGINE: dict[str, Any] = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
}


def experiment(batches: int = 20, slots: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the content of an experiment file that trains ``Line``."""
    return {
        "name": "line",
        "entrypoint": "model_def:Line",
        "hyperparameters": {"deepspeed_config": ENGINE},
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": batches},
        },
        "resources": {"slots_per_trial": slots},
        "scheduling_unit": 5,
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": 1},
        **changes,
    }
