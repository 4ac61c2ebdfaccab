"""A regression with dropout that takes its time."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from attrdict import AttrDict
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import zerotrial


class PatientTrial(zerotrial.ZeroTrial):
    """Ten measurements of a patient predict the progress of a disease."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        self.hparams = AttrDict(context.get_hparams())
        model = nn.Sequential(
            nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0)
        )
        engine, *_ = zerotrial.initialize(model=model, config=self.hparams.deepspeed_config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one micro-batch, slowly."""
        measured, outcome = self.context.to_device(next(dataloader_iter))
        loss = functional.mse_loss(self.engine(measured), outcome)
        self.engine.backward(loss)
        self.engine.step()
        time.sleep(self.hparams.seconds_per_batch)
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Squared error on one micro-batch."""
        measured, outcome = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": functional.mse_loss(self.engine(measured), outcome)}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """The first 400 patients, shuffled."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(patients(slice(0, 400)), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The last 40 patients."""
        return zerotrial.DataLoader(patients(slice(400, 440)), batch_size=10)


def patients(chosen: slice) -> TensorDataset:
    """Measurements and outcomes, with mean 0 and deviation 1 over all patients."""
    data = load_diabetes()
    measured = torch.tensor(data.data, dtype=torch.float32) * len(data.data) ** 0.5
    outcome = torch.tensor(data.target, dtype=torch.float32)
    outcome = (outcome - outcome.mean()) / outcome.std()
    return TensorDataset(measured[chosen], outcome[chosen])
