"""A small GPT as a list of layers: four pipeline stages, with the byte embedding on both ends."""

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
from zerotrial import LayerSpec, PipelineModule, TiedLayerSpec

BYTE_VALUES = 256


def standard_library(limit: int) -> torch.Tensor:
    """The first ``limit`` bytes of Python's own modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of text: inputs, and labels that are one byte ahead."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class ByteEmbedding(nn.Module):
    """Vectors of bytes; at the other end of the model the same weight scores the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(BYTE_VALUES, width) / math.sqrt(width))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map (batch, context) to (batch, context, width)."""
        return functional.embedding(text, self.weight)


def scores(embedding: ByteEmbedding, x: torch.Tensor) -> torch.Tensor:
    """Map (batch, context, width) to (batch, context, 256)."""
    return x @ embedding.weight.T


class Places(nn.Module):
    """Adds a vector for each place."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.places = nn.Embedding(context, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (batch, context, width)."""
        place: torch.Tensor = self.places(torch.arange(x.shape[1], device=x.device))
        return x + place


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
        """Keep the shape (batch, context, width)."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        further: torch.Tensor = self.feed_forward(self.norm_2(x))
        return x + further


def layers_of(width: int, depth: int, heads: int, context: int) -> list[Any]:
    """The whole model; nothing is built yet."""
    return [
        TiedLayerSpec("bytes", ByteEmbedding, width),
        LayerSpec(Places, width, context),
        *[LayerSpec(Block, width, heads) for _ in range(depth)],
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("bytes", ByteEmbedding, width, forward_fn=scores),
    ]


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over all places."""
    return functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())


class PipelineGptTrial(zerotrial.ZeroTrial):
    """One call trains a batch on all stages."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        self.hparams = AttrDict(context.get_hparams())
        shape = (self.hparams.width, self.hparams.depth, self.hparams.heads, self.hparams.context)
        model = PipelineModule(
            layers_of(*shape),
            num_stages=self.hparams.pipeline_stages,
            loss_fn=loss_of,
            partition_method="type:Block",
        )
        engine, *_ = zerotrial.initialize(model=model, config=self.hparams.deepspeed_config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor:
        """Train on a whole batch; only the first and the last stage have an iterator."""
        loss: torch.Tensor = self.engine.train_batch(dataloader_iter)
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None) -> dict[str, torch.Tensor]:
        """Loss of as many micro-batches as a batch has."""
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        """Nine tenths of the text."""
        return self._loader(training=True)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        """The last tenth."""
        return self._loader(training=False)

    def _loader(self, *, training: bool) -> zerotrial.DataLoader:
        text = standard_library(self.hparams.text_bytes)
        cut = len(text) * 9 // 10
        data = Windows(text[:cut] if training else text[cut:], self.hparams.context)
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(data, batch_size=size, shuffle=training, drop_last=True)
