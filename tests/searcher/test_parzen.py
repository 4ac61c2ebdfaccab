"""Densities against their definition, and what is proposed from them."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from zerolab.schema.space import Space
from zerolab.searcher.tpe.ladder import Ladder
from zerolab.searcher.tpe.parzen import Mixture
from zerolab.searcher.tpe.proposals import propose

REAL = {"x": {"type": "double", "minval": 0, "maxval": 1}}
WHOLE = {"n": {"type": "int", "minval": 1, "maxval": 4}}
CHOICE = {"c": {"type": "categorical", "vals": ["a", "b", "c"]}}


def mixture(space: dict[str, Any], *points: tuple[float, ...]) -> Mixture:
    return Mixture(Space(space).dimensions, np.array(points, dtype=float))


@pytest.mark.parametrize("points", [[], [0.0], [0.5], [0.03, 0.98], [0.2, 0.25, 0.9]])
def test_a_density_over_a_range_has_the_mass_one(points: list[float]) -> None:
    grid = np.linspace(0, 1, 20_001)
    density = np.exp(mixture(REAL, *[(p,) for p in points]).log_density(grid[:, None]))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("points", [[], [0.0], [1.0, 1.0, 2.0]])
def test_a_density_over_categories_has_the_mass_one(points: list[float]) -> None:
    at = np.array([[0.0], [1.0], [2.0]])
    density = np.exp(mixture(CHOICE, *[(p,) for p in points]).log_density(at))
    assert density.sum() == pytest.approx(1)


def test_a_kernel_is_as_wide_as_its_definition_says() -> None:
    density = np.exp(mixture(REAL, (0.5,)).log_density(np.array([[0.5]])))
    width = 0.1 * 2 ** (-1 / 5)
    peak = 1 / (width * math.sqrt(2 * math.pi))
    assert density[0] == pytest.approx((peak + 1) / 2)


def test_a_whole_numbers_kernel_is_at_least_half_a_step_wide() -> None:
    density = np.exp(mixture(WHOLE, (0.625,)).log_density(np.array([[0.625]])))
    peak = 1 / (0.125 * math.sqrt(2 * math.pi))
    assert density[0] == pytest.approx((peak + 1) / 2, rel=0.01)


def test_a_leaf_that_does_not_exist_takes_part_in_no_kernel() -> None:
    space = {**CHOICE, "x": REAL["x"] | {"when": {"c": "a"}}}
    names = [dimension.name for dimension in Space(space).dimensions]
    assert names == ["c", "x"]
    with_x, without = (0.0, 0.4), (1.0, math.nan)
    both = mixture(space, with_x, without)
    alone = mixture(CHOICE, (0.0,), (1.0,))
    there = np.exp(both.log_density(np.array([without])))
    assert there == pytest.approx(np.exp(alone.log_density(np.array([[1.0]]))))
    assert np.isfinite(both.log_density(np.array([with_x]))).all()


@pytest.mark.parametrize("space", [REAL, WHOLE])
def test_draws_lie_in_the_unit_interval_and_follow_the_density(space: dict[str, Any]) -> None:
    kernels = mixture(space, (0.05,), (0.1,), (0.9,))
    draws = np.array([kernels.draw(Random(seed)) for seed in range(4000)])
    assert ((draws >= 0) & (draws <= 1)).all()
    edges = np.linspace(0, 1, 11)
    counts, _ = np.histogram(draws, edges)
    middle = np.linspace(0, 1, 2001)
    density = np.exp(kernels.log_density(middle[:, None]))
    expected = [density[(middle >= a) & (middle < a + 0.1)].mean() * 400 for a in edges[:-1]]
    assert counts == pytest.approx(expected, rel=0.25, abs=25)


def test_draws_of_categories_follow_the_density() -> None:
    kernels = mixture(CHOICE, (0.0,), (0.0,), (2.0,))
    draws = np.array([kernels.draw(Random(seed)) for seed in range(4000)])
    at = np.array([[0.0], [1.0], [2.0]])
    shares = [(draws == value).mean() for value in at]
    assert shares == pytest.approx(np.exp(kernels.log_density(at)), abs=0.04)


def proposals(points: list[float], count: int) -> list[float | None]:
    """What is proposed when so many trials were judged at full length, best first."""
    ladder = Ladder(1)
    for trial_id in range(len(points)):
        ladder.insert(0, trial_id, trial_id)
    known = {trial_id: (value,) for trial_id, value in enumerate(points)}
    drawn = [propose(Space(REAL), ladder, known, [], Random(seed)) for seed in range(count)]
    return [None if point is None else point[0] for point in drawn]


def test_one_trial_in_twenty_is_drawn_from_the_whole_space() -> None:
    drawn = proposals([0.3] * 8, 1000)
    assert drawn.count(None) == pytest.approx(50, abs=20)


def test_the_best_tenth_is_good_and_the_rest_is_not() -> None:
    drawn = proposals([0.1, 0.1, 0.9] + [0.5] * 17, 300)
    known = [value for value in drawn if value is not None]
    assert sum(value < 0.3 for value in known) > 0.9 * len(known)
    assert sum(abs(value - 0.9) < 0.1 for value in known) < 0.05 * len(known)


@pytest.mark.parametrize(
    ("judged", "good", "bad"), [(8, 1, 7), (21, 3, 18), (250, 25, 100), (400, 25, 100)]
)
def test_so_many_are_good_and_bad_and_what_has_begun_is_bad_too(
    judged: int, good: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[float]] = []

    class Seen(Mixture):
        def __init__(self, dimensions: Any, points: Any) -> None:
            super().__init__(dimensions, points)
            made.append([float(point[0]) for point in points])

    monkeypatch.setattr("zerolab.searcher.tpe.proposals.Mixture", Seen)
    ladder = Ladder(1)
    points = {trial_id: (trial_id / 1000,) for trial_id in range(judged + 2)}
    for trial_id in range(judged):
        ladder.insert(0, trial_id, trial_id)
    begun = [judged, judged + 1]
    seed = next(seed for seed in range(99) if Random(seed).random() > 0.05)
    propose(Space(REAL), ladder, points, begun, Random(seed))
    best, others = made
    assert best == [points[i][0] for i in range(good)]
    assert others[bad:] == [points[i][0] for i in begun]
    assert len(set(others[:bad])) == bad
    assert set(others[:bad]) <= {points[i][0] for i in range(good, judged)}
    assert max(others[:bad]) > points[judged // 2][0]  # drawn from all of them, not their head


def test_before_eight_trials_were_judged_nothing_is_proposed() -> None:
    assert set(proposals([0.3] * 7, 20)) == {None}
