"""Stage 3 on a single rank: units are gathered by one copy, gradients are added in place."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
