"""A generator and a discriminator of handwritten digits, trained against each other."""

from collections.abc import Iterator
from typing import Any

import torch
from attrdict import AttrDict
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import zerotrial

PIXELS = 64
NOISE = 16


class GANTrial(zerotrial.ZeroTrial):
    """Two engines in one trial."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        hparams = AttrDict(context.get_hparams())
        generator = nn.Sequential(
            nn.Linear(NOISE, hparams.hidden),
            nn.ReLU(),
            nn.Linear(hparams.hidden, PIXELS),
            nn.Sigmoid(),
        )
        discriminator = nn.Sequential(
            nn.Linear(PIXELS, hparams.hidden), nn.LeakyReLU(0.2), nn.Linear(hparams.hidden, 1)
        )
        self.generator = self.engine_of(generator, hparams.deepspeed_config)
        self.discriminator = self.engine_of(discriminator, hparams.deepspeed_config)

    def engine_of(self, model: nn.Module, config: Any) -> Any:
        """Give a model an engine and register it."""
        engine, *_ = zerotrial.initialize(model=model, config=config)
        return self.context.wrap_model_engine(engine)

    def draw(self, count: int) -> torch.Tensor:
        """Let the generator draw."""
        noise = torch.randn(count, NOISE, device=self.context.device)
        pictures: torch.Tensor = self.generator(noise)
        return pictures

    def says_real(self, pixels: torch.Tensor, *, real: bool) -> torch.Tensor:
        """How far the discriminator is from saying ``real`` of these pictures."""
        scores = self.discriminator(pixels).float()
        return functional.binary_cross_entropy_with_logits(
            scores, torch.full_like(scores, float(real))
        )

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        """Train the discriminator, then the generator, on one micro-batch."""
        pixels = self.context.to_device(next(dataloader_iter))

        drawn = self.draw(len(pixels)).detach()
        told_apart = self.says_real(pixels, real=True) + self.says_real(drawn, real=False)
        self.discriminator.backward(told_apart)
        self.discriminator.step()

        self.discriminator.module.requires_grad_(requires_grad=False)  # it only passes gradients on
        fooled = self.says_real(self.draw(len(pixels)), real=True)
        self.generator.backward(fooled)
        self.generator.step()
        self.discriminator.module.requires_grad_(requires_grad=True)
        return {"discriminator_loss": told_apart, "generator_loss": fooled}

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Compare the average drawn picture with the average real one."""
        pixels = self.context.to_device(next(dataloader_iter))
        drawn = self.draw(len(pixels)).float()
        return {
            "mean_distance": (drawn.mean(dim=0) - pixels.mean(dim=0)).abs().mean(),
            "fooled": (self.discriminator(drawn) > 0).float().mean(),
        }

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """All digits, shuffled; a digit is 64 pixels from 0 to 1."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(self.digits(), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The same digits: there is nothing to overfit in their average."""
        return zerotrial.DataLoader(self.digits(), batch_size=100, drop_last=True)

    def digits(self) -> torch.Tensor:
        """Shape (1797, 64)."""
        return torch.tensor(load_digits().data, dtype=torch.float32) / 16
