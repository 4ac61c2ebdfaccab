"""Small models, data and the plain loop that engines are compared with."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

__all__ = [
    "HAS_MUON",
    "Reference",
    "TinyModel",
    "config_of",
    "full_batches",
    "needs_muon",
    "share",
]

FEATURES, CLASSES = 12, 5

HAS_MUON = hasattr(torch.optim, "Muon")
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="Muon needs torch 2.9")


class TinyModel(nn.Module):
    """Model with difficult features: tied weights, a frozen parameter, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 24)
        self.norm = nn.LayerNorm(24)
        self.mix = nn.Linear(24, 24, bias=False)
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied.weight = self.mix.weight
        self.frozen = nn.Parameter(torch.full((24,), 0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(24, CLASSES)
        self.register_buffer("offset", torch.linspace(-1, 1, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x + self.offset.to(x.dtype)))
        hidden = self.norm(self.tied(torch.tanh(self.mix(hidden)))) * self.gain + self.frozen
        logits: Tensor = self.out(hidden)
        return logits


def full_batches(count: int, samples: int, seed: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Return the full batch of each micro-step, over all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(samples, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


def share(batch: tuple[Tensor, ...], rank: int, ranks: int) -> tuple[Tensor, ...]:
    """A rank's part of a batch."""
    return tuple(part.chunk(ranks)[rank] for part in batch)


def loss_of(module: Any, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(module(x).float(), y)


class Reference:
    """Plain torch in one process, with fp32 masters of a 16-bit model and an fp64 norm.

    Args:
        steps: Optimizer steps.
        accumulation: Micro-batches of each step.
        clip: Largest norm; 0 is off.
        samples: Samples of a micro-batch over all ranks.
        dtype: Of the model.
        lr: Of AdamW.
    """

    def __init__(
        self,
        *,
        steps: int = 20,
        accumulation: int = 2,
        clip: float = 0.5,
        samples: int = 8,
        dtype: torch.dtype = torch.float32,
        lr: float = 1e-2,
        parts: int = 1,
    ) -> None:
        torch.manual_seed(0)
        model = TinyModel()
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        trained = [p.requires_grad for p in model.parameters()]
        model.to(dtype)
        model.offset = model.offset.float()
        chosen = [m for m, t in zip(masters, trained, strict=True) if t]
        optimizer = torch.optim.AdamW(chosen, lr=lr, weight_decay=0.01, fused=True)
        self.losses: list[float] = []
        self.norms: list[float] = []
        batches = iter(full_batches(steps * accumulation, samples))
        params = [p for p in model.parameters() if p.requires_grad]
        for _ in range(steps):
            sums = [torch.zeros_like(m) for m in chosen]
            total = 0.0
            for _ in range(accumulation):
                batch = next(batches)
                for part in range(parts):
                    x, y = share(batch, part, parts)
                    loss = loss_of(lambda x: model(x.to(dtype)), (x, y))
                    (loss / accumulation / parts).backward()
                    total += loss.item() / accumulation / parts
                    for accumulated, p in zip(sums, params, strict=True):
                        accumulated.add_(p.grad.float())
                        p.grad = None
            norm = torch.sqrt(sum((s.double() ** 2).sum() for s in sums)).item()
            scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            for master, accumulated in zip(chosen, sums, strict=True):
                master.grad = accumulated.mul_(scale)
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(params, chosen, strict=True):
                    p.copy_(master)
            self.losses.append(total)
            self.norms.append(norm)
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.weights = {n: m.detach() for n, m in zip(names, chosen, strict=True)}


def config_of(
    stage: int,
    *,
    ranks: int,
    accumulation: int = 2,
    clip: float = 0.5,
    samples: int = 8,
    lr: float = 1e-2,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The engine's side of :class:`Reference`."""
    return {
        "train_micro_batch_size_per_gpu": samples // ranks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }


def batches_of_rank(
    rank: int, ranks: int, *, steps: int = 20, accumulation: int = 2, samples: int = 8
) -> Iterator[tuple[Tensor, ...]]:
    """Micro-batches of one rank."""
    for batch in full_batches(steps * accumulation, samples):
        yield share(batch, rank, ranks)
