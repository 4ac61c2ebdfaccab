"""The process against its definition, written out plainly."""

import math
from random import Random

import numpy as np
import pytest

from zerolab.schema.space import Space
from zerolab.searcher.tpe.candidates import rows_of
from zerolab.searcher.tpe.gaussian import Array, GaussianProcess, embed, log_improvement

SPACE = Space(
    {
        "c": {"type": "categorical", "vals": ["a", "b", "c"]},
        "n": {"type": "int", "minval": 1, "maxval": 9},
        "x": {"type": "double", "minval": 0, "maxval": 1},
        "y": {"type": "double", "minval": 0, "maxval": 1, "when": {"c": "a"}},
    }
)
REAL = Space({"x": {"type": "double", "minval": 0, "maxval": 1}})


def points_of(space: Space, count: int) -> Array:
    rng = Random(0)
    return rows_of([space.point(rng) for _ in range(count)], len(space.dimensions))


def apart(one: Array, other: Array) -> list[float]:
    """Squared distance of two points of :data:`SPACE` in each dimension."""
    category, y = float(one[0] != other[0]) / 2, 0.0
    if np.isnan(one[3]) != np.isnan(other[3]):
        there = one[3] if np.isnan(other[3]) else other[3]
        y = (there - 0.5) ** 2 + 0.25
    elif not np.isnan(one[3]):
        y = (one[3] - other[3]) ** 2
    return [category, (one[1] - other[1]) ** 2, (one[2] - other[2]) ** 2, y]


def test_features_lie_apart_as_points_do() -> None:
    points = points_of(SPACE, 30)
    features, owners = embed(SPACE.dimensions, points)
    for one in range(30):
        for other in range(30):
            squares = (features[one] - features[other]) ** 2
            mine = np.bincount(owners, squares, 4)
            assert mine == pytest.approx(apart(points[one], points[other]))


def kernel(shape: Array, one: Array, at: int, other: Array, other_at: int) -> float:
    squares = apart(one, other)
    r = math.sqrt(sum(s / math.exp(2 * v) for s, v in zip(squares, shape[:4], strict=True)))
    matern = (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)
    return matern * math.exp(-math.exp(shape[4]) * abs(at - other_at))


RUNGS = np.array([0] * 12 + [1] * 6 + [3] * 4)


def mixed_process(shape: Array | None = None) -> tuple[GaussianProcess, Array, Array, Array]:
    """A process of 22 results on three rungs, its points, their features and their scores."""
    points = points_of(SPACE, 40)
    features, owners = embed(SPACE.dimensions, points)
    scores = np.random.default_rng(1).normal(size=22)
    process = GaussianProcess(features[:22], owners, 4, RUNGS, scores, shape=shape)
    return process, points, features, (scores - scores.mean()) / scores.std()


def test_the_gradient_is_the_slope_of_the_likelihood() -> None:
    process, *_ = mixed_process()
    shape = process.shape + 0.1
    _, gradient = process._loss(shape)
    for index in range(len(shape)):
        step = np.zeros(len(shape))
        step[index] = 1e-5
        slope = (process._loss(shape + step)[0] - process._loss(shape - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(slope, abs=1e-5)


def test_the_likelihood_is_that_of_a_normal_distribution_with_its_best_mean_and_scale() -> None:
    process, points, _, scores = mixed_process()
    shape = process.shape
    noise = np.exp(shape[5:])[np.searchsorted([0, 1, 3], RUNGS)] + 1e-6
    rows = list(zip(points[:22], RUNGS, strict=True))
    k = np.array([[kernel(shape, a, i, b, j) for b, j in rows] for a, i in rows]) + np.diag(noise)
    inverse = np.linalg.inv(k)
    mean = (inverse @ scores).sum() / inverse.sum()
    variance = (scores - mean) @ inverse @ (scores - mean) / 22
    _, determinant = np.linalg.slogdet(k)
    expected = np.log([0.7 * 2] * 4 + [0.25] + [0.16, 0.08, 0.02])  # noise doubles with each rung
    off = (shape - expected) / np.array([1.0] * 5 + [1.2] * 3)
    loss = 0.5 * (22 * math.log(variance) + determinant + off @ off)
    assert process._loss(shape)[0] == pytest.approx(loss)


def test_a_fitted_shape_is_likelier_than_what_is_expected_of_any() -> None:
    process, *_ = mixed_process()
    assert process._loss(process.shape)[0] < process._loss(process._expected)[0]


@pytest.mark.parametrize("training", [0, 3])
def test_predictions_follow_from_the_kernel(training: int) -> None:
    fitted, points, features, scores = mixed_process()
    shape = fitted.shape
    noise = dict(zip([0, 1, 3], np.exp(shape[5:]) + 1e-6, strict=True))
    rows = [*zip(points[:22], RUNGS, strict=True), *((p, 3) for p in points[22 : 22 + training])]
    k = np.array([[kernel(shape, a, i, b, j) for b, j in rows] for a, i in rows])
    k += np.diag([noise[rung] for _, rung in rows])
    known = np.linalg.inv(k[:22, :22])
    mean = (known @ scores).sum() / known.sum()
    variance = (scores - mean) @ known @ (scores - mean) / 22

    def expected(point: Array) -> float:
        near = np.array([kernel(shape, point, 3, b, j) for b, j in rows[:22]])
        return float(mean + near @ known @ (scores - mean))

    found = fitted.predict(3, features[30:], features[22 : 22 + training])
    means, deviations, lowest = found
    assert means == pytest.approx([expected(point) for point in points[30:]])
    assert lowest == pytest.approx(min(expected(point) for point in points[:22]))
    for point, deviation in zip(points[30:], deviations, strict=True):
        near = np.array([kernel(shape, point, 3, b, j) for b, j in rows])
        left = 1 - near @ np.linalg.inv(k) @ near
        assert deviation == pytest.approx(math.sqrt(variance * left))


def errors(rungs: list[int], scores: Array, x: Array) -> float:
    """How far a process is off the sine at the highest rung, in the mean over a grid."""
    grid = np.linspace(0, 1, 50)[:, None]
    owners = np.zeros(1, dtype=np.intp)
    process = GaussianProcess(x[:, None], owners, 1, np.array(rungs), scores)
    means, _, _ = process.predict(max(rungs), grid, grid[:0])
    truth = np.sin(6 * grid[:, 0])
    slope, shift = np.polyfit(means, truth, 1)  # scores are on a scale of their own
    return float(np.abs(slope * means + shift - truth).mean())


def test_a_rung_that_tells_the_truth_helps_and_one_that_tells_nothing_does_little_harm() -> None:
    rng = np.random.default_rng(3)
    x, few = rng.random(40), rng.random(5)
    above = np.sin(6 * few)
    alone = errors([1] * 5, above, few)
    honest = np.concatenate([np.sin(6 * x), above])
    lies = np.concatenate([rng.normal(size=40), above])
    both = [0] * 40 + [1] * 5
    assert errors(both, honest, np.concatenate([x, few])) < alone / 3
    assert errors(both, lies, np.concatenate([x, few])) < alone * 1.5


def test_an_improvement_is_the_mean_of_what_lies_below() -> None:
    grid = np.linspace(-9, 9, 400_001)
    density = np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi)
    for mean, deviation in [(0.0, 1.0), (1.5, 0.5), (-2.0, 0.1), (4.0, 1.0)]:
        below = np.maximum(0.3 - (mean + deviation * grid), 0.0)
        expected = math.log(float((below * density).sum() * (grid[1] - grid[0])))
        found = log_improvement(np.array([mean]), np.array([deviation]), 0.3)
        assert found[0] == pytest.approx(expected, abs=1e-4)


def test_of_two_hopeless_candidates_the_less_hopeless_one_is_better() -> None:
    means = np.array([0.0, 4.9, 5.1, 20.0, 300.0])
    gains = log_improvement(means, np.ones(5), 0.0)
    assert np.isfinite(gains).all()
    assert (np.diff(gains) < 0).all()


def test_a_gain_falls_with_the_mean_where_its_formulas_meet_too() -> None:
    means = np.linspace(4, 8, 4001)  # in deviations above the lowest
    assert (np.diff(log_improvement(means, np.ones(4001), 0.0)) < 0).all()


def test_results_that_are_all_the_same_are_no_error() -> None:
    x = np.linspace(0, 1, 9)[:, None]
    process = GaussianProcess(
        x, np.zeros(1, dtype=np.intp), 1, np.zeros(9, dtype=int), np.full(9, 0.5)
    )
    means, deviations, _ = process.predict(0, x, x[:1])
    assert np.isfinite(means).all()
    assert np.isfinite(deviations).all()
