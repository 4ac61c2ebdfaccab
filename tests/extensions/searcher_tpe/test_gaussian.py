"""Gaussian process against its definition, written out plainly."""

import math
from random import Random

import numpy as np
import pytest

from zerolab.extensions.searcher_tpe.candidates import to_rows
from zerolab.extensions.searcher_tpe.gaussian import Array, GaussianProcess, embed, log_improvement
from zerolab.schema.space import Space

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
    return to_rows([space.point(rng) for _ in range(count)], len(space.dimensions))


def apart(a: Array, b: Array) -> list[float]:
    """Return the squared distance of two points of :data:`SPACE` in each dimension."""
    category, y = float(a[0] != b[0]) / 2, 0.0
    if np.isnan(a[3]) != np.isnan(b[3]):
        coordinate = a[3] if np.isnan(b[3]) else b[3]
        y = (coordinate - 0.5) ** 2 + 0.25
    elif not np.isnan(a[3]):
        y = (a[3] - b[3]) ** 2
    return [category, (a[1] - b[1]) ** 2, (a[2] - b[2]) ** 2, y]


def test_feature_distances_match_point_distances() -> None:
    points = points_of(SPACE, 30)
    features, owners = embed(SPACE.dimensions, points)
    for i in range(30):
        for j in range(30):
            squares = (features[i] - features[j]) ** 2
            distances = np.bincount(owners, squares, 4)
            assert distances == pytest.approx(apart(points[i], points[j]))


def kernel(shape: Array, a: Array, rung_a: int, b: Array, rung_b: int) -> float:
    squares = apart(a, b)
    r = math.sqrt(sum(s / math.exp(2 * v) for s, v in zip(squares, shape[:4], strict=True)))
    matern = (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)
    return matern * math.exp(-math.exp(shape[4]) * abs(rung_a - rung_b))


RUNGS = np.array([0] * 12 + [1] * 6 + [3] * 4)


def mixed_process(shape: Array | None = None) -> tuple[GaussianProcess, Array, Array, Array]:
    """Return a process of 22 results on three rungs, with points, features and scores."""
    points = points_of(SPACE, 40)
    features, owners = embed(SPACE.dimensions, points)
    scores = np.random.default_rng(1).normal(size=22)
    process = GaussianProcess(features[:22], owners, 4, RUNGS, scores, shape=shape)
    return process, points, features, (scores - scores.mean()) / scores.std()


def test_gradient_matches_finite_differences() -> None:
    process, *_ = mixed_process()
    shape = process.shape + 0.1
    _, gradient = process._loss(shape)
    for index in range(len(shape)):
        step = np.zeros(len(shape))
        step[index] = 1e-5
        slope = (process._loss(shape + step)[0] - process._loss(shape - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(slope, abs=1e-5)


def test_likelihood_profiles_out_mean_and_scale() -> None:
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


def test_fit_improves_on_prior_mean() -> None:
    process, *_ = mixed_process()
    assert process._loss(process.shape)[0] < process._loss(process._prior_mean)[0]


@pytest.mark.parametrize("training", [0, 3])
def test_predictions_follow_from_the_kernel(training: int) -> None:
    fitted, points, features, scores = mixed_process()
    shape = fitted.shape
    noise = dict(zip([0, 1, 3], np.exp(shape[5:]) + 1e-6, strict=True))
    rows = [*zip(points[:22], RUNGS, strict=True), *((p, 3) for p in points[22 : 22 + training])]
    k = np.array([[kernel(shape, a, i, b, j) for b, j in rows] for a, i in rows])
    k += np.diag([noise[rung] for _, rung in rows])
    inverse = np.linalg.inv(k[:22, :22])
    mean = (inverse @ scores).sum() / inverse.sum()
    variance = (scores - mean) @ inverse @ (scores - mean) / 22

    def expected(point: Array) -> float:
        near = np.array([kernel(shape, point, 3, b, j) for b, j in rows[:22]])
        return float(mean + near @ inverse @ (scores - mean))

    prediction = fitted.predict(3, features[30:], features[22 : 22 + training])
    means, deviations, lowest = prediction
    assert means == pytest.approx([expected(point) for point in points[30:]])
    assert lowest == pytest.approx(min(expected(point) for point in points[:22]))
    for point, deviation in zip(points[30:], deviations, strict=True):
        near = np.array([kernel(shape, point, 3, b, j) for b, j in rows])
        remaining_variance = 1 - near @ np.linalg.inv(k) @ near
        assert deviation == pytest.approx(math.sqrt(variance * remaining_variance))


def errors(rungs: list[int], scores: Array, x: Array) -> float:
    """Return the mean error of a process from the sine at the highest rung, over a grid."""
    grid = np.linspace(0, 1, 50)[:, None]
    owners = np.zeros(1, dtype=np.intp)
    process = GaussianProcess(x[:, None], owners, 1, np.array(rungs), scores)
    means, _, _ = process.predict(max(rungs), grid, grid[:0])
    truth = np.sin(6 * grid[:, 0])
    slope, shift = np.polyfit(means, truth, 1)  # scores have an arbitrary scale
    return float(np.abs(slope * means + shift - truth).mean())


def test_informative_rung_helps_noise_rung_is_harmless() -> None:
    rng = np.random.default_rng(3)
    x, few = rng.random(40), rng.random(5)
    above = np.sin(6 * few)
    error_alone = errors([1] * 5, above, few)
    informative = np.concatenate([np.sin(6 * x), above])
    noise = np.concatenate([rng.normal(size=40), above])
    both = [0] * 40 + [1] * 5
    assert errors(both, informative, np.concatenate([x, few])) < error_alone / 3
    assert errors(both, noise, np.concatenate([x, few])) < error_alone * 1.5


def test_expected_improvement_matches_numeric_integral() -> None:
    grid = np.linspace(-9, 9, 400_001)
    density = np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi)
    for mean, deviation in [(0.0, 1.0), (1.5, 0.5), (-2.0, 0.1), (4.0, 1.0)]:
        below = np.maximum(0.3 - (mean + deviation * grid), 0.0)
        expected = math.log(float((below * density).sum() * (grid[1] - grid[0])))
        gain = log_improvement(np.array([mean]), np.array([deviation]), 0.3)
        assert gain[0] == pytest.approx(expected, abs=1e-4)


def test_improvement_ranks_hopeless_candidates() -> None:
    means = np.array([0.0, 4.9, 5.1, 20.0, 300.0])
    gains = log_improvement(means, np.ones(5), 0.0)
    assert np.isfinite(gains).all()
    assert (np.diff(gains) < 0).all()


def test_improvement_is_monotonic_at_branch_switch() -> None:
    means = np.linspace(4, 8, 4001)  # in deviations above the lowest
    assert (np.diff(log_improvement(means, np.ones(4001), 0.0)) < 0).all()


def test_constant_scores_give_finite_predictions() -> None:
    x = np.linspace(0, 1, 9)[:, None]
    process = GaussianProcess(
        x, np.zeros(1, dtype=np.intp), 1, np.zeros(9, dtype=int), np.full(9, 0.5)
    )
    means, deviations, _ = process.predict(0, x, x[:1])
    assert np.isfinite(means).all()
    assert np.isfinite(deviations).all()
