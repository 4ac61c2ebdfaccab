"""Handwritten digits with more choices than one would try by hand."""

from collections.abc import Iterator
from typing import Any

import torch
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
    pixels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(pixels[chosen], torch.tensor(data.target)[chosen])


def perceptron(hidden: int, layers: int, dropout: float) -> nn.Module:
    """Fully connected layers."""
    parts: list[nn.Module] = [nn.Flatten()]
    size = 64
    for _ in range(layers):
        parts += [nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(dropout)]
        size = hidden
    return nn.Sequential(*parts, nn.Linear(size, 10))


def convolution(channels: int, dropout: float) -> nn.Module:
    """Two convolutions, each followed by pooling."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * channels, 10),
    )


class DigitsTrial(zerotrial.ZeroTrial):
    """A perceptron or a small convolutional network, as the hyperparameters say."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        if hparams["network"] == "perceptron":
            model = perceptron(hparams["hidden"], hparams["layers"], hparams["dropout"])
        else:
            model = convolution(hparams["channels"], hparams["dropout"])
        config = zerotrial.overwrite_deepspeed_config(
            hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
        )
        engine, *_ = zerotrial.initialize(model=model, config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        loss = functional.cross_entropy(self.engine(pixels), labels)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Loss and share of right answers on one batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        scores = self.engine(pixels)
        return {
            "validation_loss": functional.cross_entropy(scores, labels),
            "accuracy": (scores.argmax(dim=1) == labels).float().mean(),
        }

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """Shuffled, a new order each epoch."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(digits(training=True), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """360 images: 12 batches of 30, so that every batch weighs the same."""
        return zerotrial.DataLoader(digits(training=False), batch_size=30)
