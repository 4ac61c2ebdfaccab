"""Stage 3 on a single rank.

Shards are used in place or gathered by one copy; gradients are added in place.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerotrial.engine import initialize

STEPS, MICRO_STEPS = 3, 2


class Shared(nn.Module):
    """Runs one block twice and another one in every second batch only; one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 1)
        self.last.bias.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, *, all_blocks: bool) -> Tensor:
        x = self.blocks[0](self.blocks[1](self.blocks[0](x)))
        if all_blocks:
            x = self.blocks[2](x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def batches() -> list[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator), index % MICRO_STEPS == 1)
        for index in range(STEPS * MICRO_STEPS)
    ]


@pytest.mark.parametrize("operation", ["mean", "sum"])
def test_shared_and_unused_blocks_match_a_plain_loop(operation: str) -> None:
    plain = Shared()
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=0.05, weight_decay=0.0
    )
    for index, (x, all_blocks) in enumerate(batches()):
        (plain(x, all_blocks=all_blocks) / MICRO_STEPS).backward()
        if index % MICRO_STEPS == 1:
            optimizer.step()
            optimizer.zero_grad()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_allreduce_op": operation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = initialize(model=Shared(), config=config)
    for x, all_blocks in batches():
        engine.backward(engine(x, all_blocks=all_blocks))
        engine.step()
    weights = engine.weights.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    engine.close()


class Words(nn.Module):
    """Its forward renormalizes a weight in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(6, 4, max_norm=0.5)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.addresses: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.addresses = [p.data_ptr() for p in self.parameters()]
        loss: Tensor = self.blocks[0](self.words(x)).square().mean()
        return loss


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_shards_are_used_in_place_unless_they_are_cast(dtype: str) -> None:
    plain = Words()
    x = torch.tensor([1, 4, 4, 2])
    plain(x)  # renormalizes
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = initialize(model=Words(), config=config)
    shards = [cast("DTensor", p).to_local().data_ptr() for p in engine.module.parameters()]
    engine.backward(engine(x))
    engine.step()
    addresses = engine.module.addresses
    if dtype == "bf16":
        assert not set(addresses) & set(shards)
    else:
        assert addresses == shards
        weights = engine.weights.full_state_dict()
        torch.testing.assert_close(weights["words.weight"], plain.words.weight.detach())
    engine.close()
