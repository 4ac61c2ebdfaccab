"""A classifier of handwritten digits whose width, optimizer and learning rate are searched for."""

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

import zerotrial


class SearchedTrial(zerotrial.ZeroTrial):
    """An MLP with one hidden layer and dropout."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        model = nn.Sequential(
            nn.Linear(64, hparams["hidden"]),
            nn.ReLU(),
            nn.Dropout(hparams["dropout"]),
            nn.Linear(hparams["hidden"], 10),
        )
        config = zerotrial.overwrite_deepspeed_config(
            hparams["deepspeed_config"], hparams["overwrite_deepspeed_args"]
        )
        engine, *_ = zerotrial.initialize(model=model, config=config)
        self.engine = context.wrap_model_engine(engine)
        images = load_digits()
        pixels = torch.tensor(images.data, dtype=torch.float32) / 16
        self.images = TensorDataset(pixels, torch.tensor(images.target))
        self.order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one micro-batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        loss = functional.cross_entropy(self.engine(pixels), labels)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Loss and share of right answers on one micro-batch."""
        pixels, labels = self.context.to_device(next(dataloader_iter))
        scores = self.engine(pixels)
        right = (scores.argmax(dim=1) == labels).float().mean()
        return {"validation_loss": functional.cross_entropy(scores, labels), "accuracy": right}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """1,437 images, in a new order each epoch."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        chosen = Subset(self.images, self.order[:1437].tolist())
        return zerotrial.DataLoader(chosen, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The other 360: 12 batches of 30, so that every batch weighs the same."""
        return zerotrial.DataLoader(Subset(self.images, self.order[1437:].tolist()), batch_size=30)
