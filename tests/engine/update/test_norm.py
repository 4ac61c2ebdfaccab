"""Sums of squares: how exact they are, in each type."""

import math

import pytest
import torch
from torch import nn

from zerotrial.engine import initialize
from zerotrial.engine.update.norm import squared_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 100_003])
def test_squared_norm_matches_fp64(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    exact = float(values.double().square().sum())
    actual = squared_norm(values)
    assert actual.dtype == torch.float64
    assert actual.shape == ()
    assert float(actual) == pytest.approx(exact, rel=3e-7)


def test_squared_norm_of_millions_of_equal_elements() -> None:
    values = torch.full((4_000_000,), 0.1234567)
    exact = float(values.double().square().sum())
    assert float(squared_norm(values)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("position", [0, 300, 999])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_squared_norm_of_non_finite_values(position: int, bad: float) -> None:
    values = torch.ones(1000)
    values[position] = bad
    assert not math.isfinite(float(squared_norm(values)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_norm_is_the_norm_of_the_exact_mean(stage: int) -> None:
    """The remaining difference of bf16 and fp32 is the model's arithmetic, not the engine's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    other = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).bfloat16()
    other.load_state_dict({k: v.bfloat16() for k, v in model.state_dict().items()})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine = initialize(model=model, config=config)[0]
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in other.parameters()]
    for _ in range(3):
        x = torch.randn(4, 16).bfloat16()
        other.zero_grad()
        (other(x).square().mean() / 3).backward()
        for total, parameter in zip(sums, other.parameters(), strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad)
        engine.backward(engine(x).square().mean())
        engine.step()
    exact = math.sqrt(sum(float(total.square().sum()) for total in sums))
    assert engine.get_global_grad_norm() == pytest.approx(exact, rel=1e-6)
    engine.close()
