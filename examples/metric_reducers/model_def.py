"""A classifier of digits whose metrics need more than one number a batch."""

from collections.abc import Iterator
from typing import Any

import torch
from attrdict import AttrDict
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import zerotrial

CLASSES = 10
TRAINING_SAMPLES = 1437


class Confusion(zerotrial.MetricReducer):
    """Counts which digit was taken for which; (true, predicted), over all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts = torch.zeros(CLASSES, CLASSES)

    def update(self, labels: torch.Tensor, predicted: torch.Tensor) -> None:
        """Count one micro-batch."""
        pairs = labels.cpu() * CLASSES + predicted.cpu()
        self.counts += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)

    def per_slot_reduce(self) -> list[list[float]]:
        """What this rank counted."""
        return self.counts.tolist()

    def cross_slot_reduce(self, per_slot_metrics: list[list[list[float]]]) -> dict[str, float]:
        """F1 of each digit, and their mean."""
        counts = torch.tensor(per_slot_metrics).sum(dim=0)
        hits = counts.diag()
        f1 = 2 * hits / (counts.sum(dim=0) + counts.sum(dim=1)).clamp(min=1)
        return {"f1": f1.mean().item()} | {
            f"f1_{digit}": f1[digit].item() for digit in range(CLASSES)
        }


def worst(losses: list[float]) -> float:
    """The largest loss of any micro-batch on any rank."""
    return max(losses)


class ReducersTrial(zerotrial.ZeroTrial):
    """A linear classifier."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        hparams = AttrDict(context.get_hparams())
        engine, *_ = zerotrial.initialize(
            model=nn.Linear(64, CLASSES), config=hparams.deepspeed_config
        )
        self.engine = context.wrap_model_engine(engine)
        self.confusion = context.wrap_reducer(Confusion(), for_training=False)
        self.worst = context.wrap_reducer(worst, name="worst_loss")

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one micro-batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        loss = functional.cross_entropy(self.engine(pixels), labels)
        self.engine.backward(loss)
        self.engine.step()
        self.worst.update(loss.item())
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Feed the reducers; what is returned here is averaged as usual."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        scores = self.engine(pixels)
        loss = functional.cross_entropy(scores, labels)
        self.worst.update(loss.item())
        self.confusion.update(labels, scores.argmax(dim=1))
        return {"validation_loss": loss}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """Shuffled, a new order each epoch."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(digits(training=True), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The last 360 digits."""
        return zerotrial.DataLoader(digits(training=False), batch_size=30)


def digits(*, training: bool) -> TensorDataset:
    """Pixels scaled to 0..1, and labels."""
    data = load_digits()
    chosen = slice(0, TRAINING_SAMPLES) if training else slice(TRAINING_SAMPLES, None)
    pixels = torch.tensor(data.data[chosen], dtype=torch.float32) / 16
    return TensorDataset(pixels, torch.tensor(data.target[chosen]))
