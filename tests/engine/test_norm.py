"""Sums of squares: how exact they are, in each type."""

import math

import pytest
import torch

from zerotrial.engine.update.norm import squared_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 100_003])
def test_a_sum_of_squares_is_that_of_fp64(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    exact = float(values.double().square().sum())
    found = squared_norm(values)
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert float(found) == pytest.approx(exact, rel=3e-7)


def test_a_sum_over_millions_of_equal_elements_stays_exact() -> None:
    values = torch.full((4_000_000,), 0.1234567)
    exact = float(values.double().square().sum())
    assert float(squared_norm(values)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("place", [0, 300, 999])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_shows(place: int, bad: float) -> None:
    values = torch.ones(1000)
    values[place] = bad
    assert not math.isfinite(float(squared_norm(values)))
