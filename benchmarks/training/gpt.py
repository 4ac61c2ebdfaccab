"""The model of the engine's benchmarks: a GPT on bytes, and text to train it on."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "SIZES", "Block", "Size", "batches"]

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    width: int
    layers: int
    heads: int
    sequence: int = 128
    micro: int = 0
    """Samples of a micro-batch that keep a GPU of 80 GB busy; 0 for sizes that are too small."""


SIZES = {
    "1m": Size(128, 4, 4),
    "10m": Size(320, 8, 5),
    "50m": Size(576, 12, 9),
    "124m": Size(768, 17, 12, 1024, micro=32),
    "350m": Size(1024, 28, 16, 1024, micro=16),
    "1.3b": Size(2048, 26, 16, 1024, micro=8),
}
"""By about the number of parameters; the last three are for GPUs."""


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.first(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Returns the mean cross-entropy of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = (
                    0.02 / (2 * size.layers) ** 0.5 if "out." in name or "down." in name else 0.02
                )
                nn.init.normal_(parameter, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(samples: int, sequence: int, rank: int, seed: int = 0) -> Iterator[Tensor]:
    """Endless micro-batches of the standard library's source; (samples, sequence + 1) int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        starts = torch.randint(0, len(data) - sequence - 1, (samples,), generator=generator)
        yield torch.stack([data[s : s + sequence + 1] for s in starts.tolist()]).long()
