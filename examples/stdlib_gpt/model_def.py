"""A small GPT that reads the Python standard library, byte by byte."""

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrdict import AttrDict
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import zerotrial

BYTE_VALUES = 256


def standard_library(limit: int) -> torch.Tensor:
    """The first ``limit`` bytes of the library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, size = [], 0
    for path in sorted(folder.glob("*.py")):
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(text)[:limit]), dtype=torch.uint8)


class Windows(Dataset[torch.Tensor]):
    """Pieces of ``context + 1`` bytes: what is read, shifted by one against what is predicted."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class Block(nn.Module):
    """Attention to earlier bytes, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        further: torch.Tensor = self.feed_forward(self.norm_2(x))
        return x + further


class GPT(nn.Module):
    """Byte and place embeddings, blocks, and the scores of each next byte."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_VALUES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTE_VALUES, bias=False)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map byte values (batch, context) to scores (batch, context, 256)."""
        hidden = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.scores(self.norm(hidden))
        return scores


class StdlibTrial(zerotrial.ZeroTrial):
    """Predict the next byte."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        self.hparams = hparams = AttrDict(context.get_hparams())
        text = standard_library(hparams.training_bytes)
        cut = len(text) * 19 // 20
        self.training, self.validation = text[:cut], text[cut:]
        model = GPT(hparams.width, hparams.depth, hparams.heads, hparams.context)
        config = zerotrial.overwrite_deepspeed_config(
            hparams.deepspeed_config, hparams.get("overwrite_deepspeed_args", {})
        )
        engine, *_ = zerotrial.initialize(model=model, config=config)
        self.engine = context.wrap_model_engine(engine)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean over all bytes, in nats."""
        windows = self.context.to_device(windows)
        scores = self.engine(windows[:, :-1]).float()
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on one micro-batch."""
        loss = self.loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Loss on one micro-batch of text that is not trained on."""
        loss = self.loss(next(dataloader_iter))
        return {"validation_loss": loss, "bits_per_byte": loss / math.log(2)}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """Shuffled windows."""
        size = self.context.get_train_micro_batch_size_per_gpu()
        windows = Windows(self.training, self.hparams.context)
        return zerotrial.DataLoader(windows, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The last twentieth of the text; windows that do not fill a batch are left out."""
        windows = Windows(self.validation, self.hparams.context)
        return zerotrial.DataLoader(windows, batch_size=16, drop_last=True)
