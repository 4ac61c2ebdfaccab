"""Densities against their definition, and draws from them."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from zerolab.extensions.searcher_tpe.parzen import Mixture
from zerolab.schema.space import Space

REAL = {"x": {"type": "double", "minval": 0, "maxval": 1}}
WHOLE = {"n": {"type": "int", "minval": 1, "maxval": 4}}
CHOICE = {"c": {"type": "categorical", "vals": ["a", "b", "c"]}}


def mixture(space: dict[str, Any], *points: tuple[float, ...]) -> Mixture:
    return Mixture(Space(space).dimensions, np.array(points, dtype=float))


@pytest.mark.parametrize("points", [[], [0.0], [0.5], [0.03, 0.98], [0.2, 0.25, 0.9]])
def test_density_over_range_integrates_to_one(points: list[float]) -> None:
    grid = np.linspace(0, 1, 20_001)
    density = np.exp(mixture(REAL, *[(p,) for p in points]).log_density(grid[:, None]))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("points", [[], [0.0], [1.0, 1.0, 2.0]])
def test_density_over_categories_sums_to_one(points: list[float]) -> None:
    at = np.array([[0.0], [1.0], [2.0]])
    density = np.exp(mixture(CHOICE, *[(p,) for p in points]).log_density(at))
    assert density.sum() == pytest.approx(1)


def test_kernel_width_follows_definition() -> None:
    density = np.exp(mixture(REAL, (0.5,)).log_density(np.array([[0.5]])))
    width = 0.1 * 2 ** (-1 / 5)
    peak = 1 / (width * math.sqrt(2 * math.pi))
    assert density[0] == pytest.approx((peak + 1) / 2)


def test_int_kernel_is_at_least_half_a_step_wide() -> None:
    density = np.exp(mixture(WHOLE, (0.625,)).log_density(np.array([[0.625]])))
    peak = 1 / (0.125 * math.sqrt(2 * math.pi))
    assert density[0] == pytest.approx((peak + 1) / 2, rel=0.01)


def test_missing_leaf_is_ignored_by_kernels() -> None:
    space = {**CHOICE, "x": REAL["x"] | {"when": {"c": "a"}}}
    names = [dimension.name for dimension in Space(space).dimensions]
    assert names == ["c", "x"]
    with_x, without = (0.0, 0.4), (1.0, math.nan)
    both = mixture(space, with_x, without)
    categories_only = mixture(CHOICE, (0.0,), (1.0,))
    density = np.exp(both.log_density(np.array([without])))
    assert density == pytest.approx(np.exp(categories_only.log_density(np.array([[1.0]]))))
    assert np.isfinite(both.log_density(np.array([with_x]))).all()


@pytest.mark.parametrize("space", [REAL, WHOLE])
def test_draws_follow_density_within_unit_interval(space: dict[str, Any]) -> None:
    kernels = mixture(space, (0.05,), (0.1,), (0.9,))
    draws = kernels.draw(Random(0), 4000)
    assert draws.shape == (4000, 1)
    assert ((draws >= 0) & (draws <= 1)).all()
    edges = np.linspace(0, 1, 11)
    counts, _ = np.histogram(draws, edges)
    middle = np.linspace(0, 1, 2001)
    density = np.exp(kernels.log_density(middle[:, None]))
    expected = [density[(middle >= a) & (middle < a + 0.1)].mean() * 400 for a in edges[:-1]]
    assert counts == pytest.approx(expected, rel=0.25, abs=25)


def test_category_draws_follow_density() -> None:
    kernels = mixture(CHOICE, (0.0,), (0.0,), (2.0,))
    draws = kernels.draw(Random(0), 4000)
    at = np.array([[0.0], [1.0], [2.0]])
    shares = [(draws == value).mean() for value in at]
    assert shares == pytest.approx(np.exp(kernels.log_density(at)), abs=0.04)
