"""Small models for stage 3, and the plain one-process loop that it must agree with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 13
LENGTH = 6

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # No bias: the gradient of a key's bias is zero but for rounding, which Adam blows up.
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(x)))


class Language(nn.Module):
    """Blocks between an embedding and a head that share one weight; returns the loss."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Reading(nn.Module):
    """Reads weights of its units before, after and instead of calling them; returns the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, width) for n in (VOCABULARY, LENGTH))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embeds[0](tokens) + self.embeds[1].weight
        x = x + functional.linear(x, self.blocks[1].up.weight[: x.shape[-1]])
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(x, self.embeds[0].weight)
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def make_batches(steps: int, micro: int, ranks: int, seed: int = 7) -> list[list[list[Batch]]]:
    """Micro-batches by step, micro-step and rank."""
    generator = torch.Generator().manual_seed(seed)

    def sample() -> Batch:
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return [[[sample() for _ in range(ranks)] for _ in range(micro)] for _ in range(steps)]


@dataclass
class Course:
    """Results of a training run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_plainly(
    build: Callable[[], nn.Module],
    batches: list[list[list[Any]]],
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    *,
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Course:
    """One process, no engine: every rank's micro-batches one after the other.

    Masters are fp32; in 16 bits the model is a copy of them, and gradients are added up in fp32.
    The norm is summed in fp64.
    """
    masters = build()
    model = build().to(dtype)
    stepper = optimizer(decay_groups(masters))
    names = [name for name, p in masters.named_parameters() if p.requires_grad]
    losses, norms = [], []
    for step in batches:
        copies = dict(model.named_parameters())
        with torch.no_grad():
            for name, master in masters.named_parameters():
                copies[name].copy_(master)
        totals = {name: torch.zeros_like(masters.get_parameter(name)) for name in names}
        count, total_loss = sum(len(micro) for micro in step), 0.0
        for micro in step:
            for batch in micro:
                loss = model(*batch)
                model.zero_grad()
                (loss * scale / count).backward()
                total_loss += loss.item() / count
                for name in names:
                    if (gradient := copies[name].grad) is not None:
                        totals[name] += gradient.float() / scale
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in totals.values()))
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, total in totals.items():
            masters.get_parameter(name).grad = total * factor
        stepper.step()
        losses.append(total_loss)
        norms.append(norm)
    return Course(losses, norms, {n: p.detach().clone() for n, p in masters.named_parameters()})
