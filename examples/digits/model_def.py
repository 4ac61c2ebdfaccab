"""A small classifier of handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn."""

from collections.abc import Iterator
from typing import Any

import torch
from attrdict import AttrDict
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import zerotrial

TRAINING_SAMPLES = 1437  # four fifths; the rest is for validation


def digits(*, training: bool) -> TensorDataset:
    """Pixels scaled to 0..1, and labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAINING_SAMPLES] if training else order[TRAINING_SAMPLES:]
    pixels = torch.tensor(data.data, dtype=torch.float32) / 16
    return TensorDataset(pixels[chosen], torch.tensor(data.target)[chosen])


class DigitsTrial(zerotrial.ZeroTrial):
    """An MLP with one hidden layer."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        self.hparams = AttrDict(context.get_hparams())
        model = nn.Sequential(
            nn.Linear(64, self.hparams.hidden),
            nn.ReLU(),
            nn.Linear(self.hparams.hidden, 10),
        )
        config = zerotrial.overwrite_deepspeed_config(
            self.hparams.deepspeed_config, self.hparams.get("overwrite_deepspeed_args", {})
        )
        engine, *_ = zerotrial.initialize(model=model, config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one micro-batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        loss = functional.cross_entropy(self.engine(pixels).float(), labels)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Loss and share of right answers on one micro-batch; the first wrong ones as images."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        scores = self.engine(pixels).float()
        answers = scores.argmax(dim=1)
        wrong = (answers != labels).nonzero()[:3, 0]
        captions = [f"{labels[index]} as {answers[index]}" for index in wrong.tolist()]
        images = pixels[wrong].reshape(-1, 1, 8, 8)
        self.context.report_image("misclassified", images, caption=captions)
        return {
            "validation_loss": functional.cross_entropy(scores, labels),
            "accuracy": (answers == labels).float().mean(),
        }

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """Shuffled, a new order each epoch."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(digits(training=True), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """360 images: 12 batches of 30, so that every batch weighs the same."""
        return zerotrial.DataLoader(digits(training=False), batch_size=30)
