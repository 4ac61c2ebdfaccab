"""Helpers of the checkpoint tests: a small model, its engine, and steps on fixed data."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine import Engine, initialize

SAMPLES = 8
"""In one optimizer step, over all ranks."""


class Net(nn.Module):
    """Odd sizes, a frozen parameter, a buffer, and a weight that is used twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17)
        self.blocks = nn.ModuleList([nn.Linear(17, 17) for _ in range(2)])
        self.norm = nn.LayerNorm(17)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(17, 6, bias=False)
        self.head.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.tied = self.head
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 6), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(self.norm(hidden)))
        return (self.head(self.dropout(hidden)) * self.frozen - x).square().mean()


class Ranks:
    """Fake ``mpu``: the data-parallel ranks are a part of the world."""

    def __init__(
        self, group: dist.ProcessGroup, model_group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.model_group = model_group

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.model_group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group


def make_engine(
    stage: int,
    *,
    mpu: Any = None,
    dropout: float = 0.0,
    seed: int = 0,
    optimizer: dict[str, Any] | None = None,
    **config: Any,
) -> Engine:
    """Build an engine on a fresh :class:`Net`."""
    torch.manual_seed(seed)
    model = Net(dropout)
    zero = {"stage": stage, **config.pop("zero", {})}
    full = {
        "train_batch_size": SAMPLES,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        **config,
    }
    return initialize(model=model, config=full, mpu=mpu)[0]


def train(engine: Engine, steps: int) -> list[float]:
    """Take optimizer steps on data that depends on the step's number only.

    Returns:
        This rank's loss at each step.
    """
    rank = dist.get_rank(engine.group) if engine.group is not None else 0
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        batch = torch.randn(SAMPLES, 6, generator=generator)
        local = batch[rank :: engine.dp_world_size]
        total = 0.0
        for part in local.chunk(engine.gradient_accumulation_steps()):
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        losses.append(total)
    return losses


def probe(engine: Engine) -> float:
    """Return a loss that every rank computes on the same data: equal weights, equal bits."""
    engine.eval()
    with torch.no_grad():
        loss = float(engine(torch.randn(5, 6, generator=torch.Generator().manual_seed(7))))
    engine.train()
    return loss


def all_states(engine: Engine) -> dict[str, Tensor]:
    """Return every master weight and optimizer state, whole, on every rank. **Collective**."""
    group = engine.group
    local = [
        (piece.name, piece.start, piece.stop, {k: v.clone() for k, v in piece.tensors.items()})
        for piece in engine.stage.pieces()
    ]
    everyones: list[Any] = [None] * engine.dp_world_size
    if group is None:
        everyones = [local]
    else:
        dist.all_gather_object(everyones, local, group=group)
    merged: dict[str, list[tuple[int, Tensor]]] = {}
    for part in everyones:
        for name, start, _, tensors in part:
            for kind, tensor in tensors.items():
                merged.setdefault(f"{name}/{kind}", []).append((start, tensor))
    return {
        key: torch.cat([tensor for _, tensor in sorted(parts, key=lambda item: item[0])])
        for key, parts in merged.items()
    }
