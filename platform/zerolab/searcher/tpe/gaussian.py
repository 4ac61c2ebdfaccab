"""A Gaussian process over the rungs: what a trial would come to at one, and how sure that is.

Two results, of points x and y at the rungs a and b, go together as

    k = Matern-5/2(|x - y|) exp(-decay |a - b|)

with a length scale for each dimension; besides, each rung has noise of its own. So a rung that
ranks trials otherwise than the next one, or is all noise, is found to say little of it.

Shapes: N results, C candidates, P points that are being trained, L rungs, D dimensions; F features
of a point, each of which belongs to a dimension.

References:
    Rasmussen and Williams, Gaussian Processes for Machine Learning, MIT Press 2006: equations 4.17
    (the kernel), 2.25 and 2.26 (what is predicted), 5.9 (the gradient of the likelihood).
    Swersky, Snoek and Adams, Multi-Task Bayesian Optimization, NeurIPS 2013: a product of kernels.
    Jones, Schonlau and Welch, Efficient Global Optimization of Expensive Black-Box Functions, 1998:
    the expected improvement. Riedmiller and Braun, A Direct Adaptive Method for Faster
    Backpropagation Learning, 1993: the steps in which the shape is fitted.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Dimension

__all__ = ["GaussianProcess", "embed", "log_improvement"]

Array = NDArray[np.float64]

_LENGTH, _LENGTH_SPREAD = 0.7, 1.0
"""Expected length scale, times the root of D; spread of its logarithm."""
_DECAY, _DECAY_SPREAD = 0.25, 1.0
_NOISE, _NOISE_GROWTH, _NOISE_SPREAD = 0.02, 2.0, 1.2
"""Expected variance of the noise at the highest rung, as a part of the whole; how many times as
much it is a rung below; spread of its logarithm."""
_FLOOR = 1e-6
"""Least variance of the noise."""
_STEPS = 25
_STEP, _LEAST_STEP, _MOST_STEP = 0.25, 1e-3, 0.8
_FASTER, _SLOWER = 1.3, 0.5
"""How much longer a step is while the sign of the gradient stays, and when it has turned."""
_FARTHEST = 3.0
"""Spreads from what is expected."""
_SHAPE_DIGITS = 3
_GRADIENT_DIGITS = 9
"""Decimals: sums differ in the sixteenth from machine to machine, gradients in the twelfth."""
_APART = 0.5
"""Half the distance of two categories is this squared; and how far a leaf is from none."""


def embed(dimensions: Sequence[Dimension], points: Array) -> tuple[Array, NDArray[np.intp]]:
    """Features of points, whose distances are those of the points.

    A number is its coordinate. Two categories lie 0.7 apart. A leaf that does not exist lies in the
    middle, half a unit aside.

    Args:
        dimensions: Of the space; D of them.
        points: (N, D); NaN for a leaf that does not exist.

    Returns:
        (N, F); and (F,), the dimension of each feature.
    """
    columns: list[Array] = []
    owners: list[int] = []
    for index, dimension in enumerate(dimensions):
        at = points[:, index]
        missing = np.isnan(at)
        if dimension.kind == "categorical":
            there = np.unique(at[~missing])
            mine = [_APART * (at == category) for category in there]
        else:
            mine = [np.where(missing, 0.5, at)]
            if dimension.when:
                mine.append(_APART * missing)
        columns += mine
        owners += [index] * len(mine)
    features = np.array(columns, dtype=float).reshape(len(columns), len(points)).T
    return features, np.array(owners, dtype=np.intp)


class GaussianProcess:
    """Results, and what follows from them.

    Args:
        features: (N, F).
        owners: (F,): the dimension of each feature.
        dimensions: D.
        rungs: (N,): the rung of each result.
        scores: (N,): the results; smaller is better.
        shape: Of another process with the same rungs; None to fit one.
    """

    def __init__(
        self,
        features: Array,
        owners: NDArray[np.intp],
        dimensions: int,
        rungs: NDArray[np.int64],
        scores: Array,
        *,
        shape: Array | None = None,
    ) -> None:
        self._features, self._owners, self._dimensions = features, owners, dimensions
        used = features.any(axis=0)  # of a category that no result has there is nothing to learn
        self._used, self._their_owners = features[:, used], owners[used]
        self._rungs = rungs
        centred = scores - scores.mean()
        self._scores = centred / (centred.std() or 1.0)
        levels = np.unique(rungs)  # (L,)
        self._is_at = (rungs == levels[:, None]).astype(float)  # (L, N)
        self._between = np.abs(rungs[:, None] - rungs)  # (N, N): rungs
        self._expected = np.log(
            [_LENGTH * math.sqrt(max(dimensions, 1))] * dimensions
            + [_DECAY]
            + [_NOISE * _NOISE_GROWTH ** (levels[-1] - level) for level in levels]
        )
        spreads = [_LENGTH_SPREAD] * dimensions + [_DECAY_SPREAD] + [_NOISE_SPREAD] * len(levels)
        self._spread = np.array(spreads)
        self.shape = self._fit() if shape is None else shape
        """Logarithms of D length scales, the decay, and L variances of noise; lowest rung first."""

    def _fit(self) -> Array:
        """The most likely shape, nearly: a few steps by the signs of the gradient."""
        shape, step = self._expected.copy(), np.full(len(self._expected), _STEP)
        lowest, best, before = math.inf, shape, np.zeros(len(shape))
        reach = _FARTHEST * self._spread
        for _ in range(_STEPS):
            loss, gradient = self._loss(shape)
            if loss < lowest:
                lowest, best = loss, shape
            kept = gradient * before
            step = np.where(kept > 0, step * _FASTER, np.where(kept < 0, step * _SLOWER, step))
            step = step.clip(_LEAST_STEP, _MOST_STEP)
            moved = shape - np.sign(gradient) * step
            shape, before = moved.clip(self._expected - reach, self._expected + reach), gradient
        return best.round(_SHAPE_DIGITS)

    def _loss(self, shape: Array) -> tuple[float, Array]:
        """The negative logarithm of how likely a shape is, and its gradient.

        The scale and the mean of all scores are the most likely ones.
        """
        d, n = self._dimensions, len(self._scores)
        noise = np.exp(shape[d + 1 :])  # (L,)
        r = _distances(shape[self._their_owners], self._used, self._used)  # (N, N)
        falls, along = np.exp(-r), _along(shape[d], self._between)
        k = _matern(r) * along
        inverse = np.linalg.inv(k + np.diag(noise @ self._is_at + _FLOOR))
        weights, variance = self._weights(inverse.sum(axis=1), inverse @ self._scores)
        _, determinant = np.linalg.slogdet(inverse)
        off = (shape - self._expected) / self._spread
        loss = 0.5 * (n * math.log(variance) - float(determinant) + float(off @ off))
        slope = inverse - np.outer(weights, weights) / variance  # (N, N)
        gradient = off / self._spread
        # For each feature the sum over i, j of across[i, j] (x_i - x_j)^2.
        across = slope * along * (1 + r) * falls * (5 / 3)
        sums = across.sum(axis=1) @ self._used**2
        sums -= (self._used * (across @ self._used)).sum(axis=0)
        gradient[:d] += np.exp(-2 * shape[:d]) * np.bincount(self._their_owners, sums, d)
        gradient[d] -= 0.5 * math.exp(shape[d]) * float((slope * k * self._between).sum())
        gradient[d + 1 :] += 0.5 * noise * (self._is_at @ np.diag(slope))
        return loss, gradient.round(_GRADIENT_DIGITS)

    def predict(self, rung: int, candidates: Array, training: Array) -> tuple[Array, Array, float]:
        """What candidates would come to at a rung.

        Args:
            rung: The highest one of the results.
            candidates: (C, F).
            training: (P, F): what will be known at that rung; it is taken for what is expected of
                it, so that another one is not sent to the same place.

        Returns:
            (C,) expected scores, (C,) their deviations, and the lowest score that is expected of
            any of the results' points; all on one scale.
        """
        n, p, d = len(self._scores), len(training), self._dimensions
        features = np.concatenate([self._features, training, candidates])
        rungs = np.concatenate([self._rungs, np.full(p, rung)])
        noise = np.exp(self.shape[d + 1 :])
        noises = np.concatenate([noise @ self._is_at, np.full(p, noise[-1])]) + _FLOOR
        lengths = self.shape[self._owners]  # (F,)
        like = _matern(_distances(lengths, features, features[: n + p]))  # (N + P + C, N + P)
        there = like * _along(self.shape[d], np.abs(rung - rungs))  # were all at that rung
        among = like[: n + p] * _along(self.shape[d], np.abs(rungs[:, None] - rungs))
        among[np.diag_indices_from(among)] += noises
        sides = np.stack([np.ones(n), self._scores], axis=1)
        ones, solved = np.linalg.solve(among[:n, :n], sides).T
        weights, variance = self._weights(ones, solved)
        expected = _mean(ones, solved) + there[:, :n] @ weights  # (N + P + C,)
        near = there[n + p :]  # (C, N + P)
        left = 1 - (near * np.linalg.solve(among, near.T).T).sum(axis=1)
        deviation = np.sqrt(variance * left.clip(_FLOOR))
        return expected[n + p :], deviation, float(expected[:n].min())

    def _weights(self, ones: Array, solved: Array) -> tuple[Array, float]:
        """The inverse of the kernel's matrix times what the scores are off, and their variance.

        Args:
            ones: (N,): the inverse times ones.
            solved: (N,): the inverse times the scores.
        """
        mean = _mean(ones, solved)
        weights = solved - mean * ones
        variance = float((self._scores - mean) @ weights) / len(weights)
        return weights, max(variance, _FLOOR)


def _distances(lengths: Array, one: Array, other: Array) -> Array:
    """Of all pairs, in length scales, times the root of 5.

    Args:
        lengths: (F,), logarithms of the length scales.
        one: (K, F).
        other: (L, F).

    Returns:
        (K, L)
    """
    scale = math.sqrt(5) * np.exp(-lengths)
    one, other = one * scale, other * scale
    squares: Array = (one * one).sum(axis=1)[:, None] + (other * other).sum(axis=1)
    distances: Array = np.sqrt((squares - 2 * one @ other.T).clip(0))
    return distances


def _matern(r: Array) -> Array:
    """The kernel with the smoothness 5/2, at distances times the root of 5."""
    k: Array = (1 + r + r * r / 3) * np.exp(-r)
    return k


def _along(decay: float, between: Array) -> Array:
    """What is left over so many rungs; ``decay`` is its logarithm."""
    left: Array = np.exp(-math.exp(decay) * between)
    return left


def _mean(ones: Array, solved: Array) -> float:
    """The most likely mean of all scores: each weighed by the inverse of the kernel's matrix."""
    return float(solved.sum() / ones.sum())


def log_improvement(mean: Array, deviation: Array, lowest: float) -> Array:
    """The logarithm of how much lower than the lowest a score is expected to be.

    Args:
        mean: (C,), expected scores.
        deviation: (C,), above 0.
        lowest: Score that there is.

    Returns:
        (C,)
    """
    z = (lowest - mean) / deviation
    near = z.clip(-5)
    below = np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in near])
    improved = np.exp(-near * near / 2) / math.sqrt(2 * math.pi) + near * below
    far = np.minimum(z, -5)  # there it is nearly, and not less than, this part of the density
    tail = -far * far / 2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(-far)
    tail += np.log1p(-3 / far**2)
    gain: Array = np.where(z > -5, np.log(improved.clip(1e-300)), tail) + np.log(deviation)
    return gain
