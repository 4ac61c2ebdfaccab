"""Training continues after an interrupted micro-batch: an exception or zero_grad()."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ZerolabError

STEPS, ACCUMULATION = 3, 2


class Fails(torch.autograd.Function):
    """Function whose backward raises on demand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.on:
            raise ValueError("in backward")
        return gradients[0], None


class Fragile(nn.Module):
    """Two blocks; can raise between them, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.leave = nn.Linear(8, 1)

    def forward(self, x: Tensor, fail: str = "") -> Tensor:
        hidden = self.blocks[0](torch.tanh(self.enter(x)))
        if fail == "forward":
            raise KeyError("in forward")
        apply: Any = Fails.apply
        hidden = self.blocks[1](torch.tanh(apply(hidden, fail == "backward")))
        loss: Tensor = self.leave(hidden).square().mean()
        return loss


def batch(index: int, rank: int, ranks: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(index)).chunk(ranks)[rank]


def plain() -> dict[str, Tensor]:
    model = Fragile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            (model(batch(step * ACCUMULATION + micro, 0, 1)) / ACCUMULATION).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def forward_raises(engine: Any, x: Tensor) -> None:
    with contextlib.suppress(KeyError):
        engine(x, "forward")


def backward_raises(engine: Any, x: Tensor) -> None:
    with pytest.raises(ValueError, match="in backward"):
        engine.backward(engine(x, "backward"))
    with pytest.raises(ZerolabError, match=r"backward\(\) that raised"):
        engine.step()


def drop_gradients(engine: Any, x: Tensor) -> None:
    engine.backward(100 * engine(x))
    engine.zero_grad()
    with pytest.raises(ZerolabError, match="without backward"):
        engine.step()


def restart_window(engine: Any, x: Tensor) -> None:
    engine.backward(100 * engine(x))
    engine.step()
    backward_raises(engine, x)


BREAKS: list[Callable[[Any, Tensor], None]] = [
    forward_raises,
    backward_raises,
    drop_gradients,
    restart_window,
]


def differences(stages: tuple[int, ...] = (0, 1, 2, 3)) -> dict[tuple[str, int], float]:
    """Return the largest weight differences from a plain loop, by interruption and stage."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    expected, results = plain(), {}
    for breaks in BREAKS:
        for stage in stages:
            engine = zerotrial.initialize(
                model=Fragile(),
                config={
                    "train_batch_size": 8 * ACCUMULATION,
                    "gradient_accumulation_steps": ACCUMULATION,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                    "zero_optimization": {"stage": stage, "reduce_bucket_size": 80},
                },
            )[0]
            for index in range(STEPS * ACCUMULATION):
                x = batch(index, rank, ranks)
                if index % ACCUMULATION == 0:
                    breaks(engine, x)
                engine.backward(engine(x))
                engine.step()
            assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * ACCUMULATION)
            weights = dict(engine.stage.full_weights())
            results[breaks.__name__, stage] = max(
                float((weights[name] - value).abs().max()) for name, value in expected.items()
            )
            engine.close()
    return results


@pytest.mark.slow
def test_broken_micro_batch_leaves_no_trace() -> None:
    results = differences()
    assert max(results.values()) < 1e-6, results


@pytest.mark.processes
def test_ranks_continue_after_broken_micro_batch() -> None:
    for results in run_on_ranks(differences, 2):
        assert max(results.values()) < 1e-6, results
