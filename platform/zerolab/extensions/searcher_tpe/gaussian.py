"""Gaussian-process surrogate: mean and variance of the metric at a rung.

Two results, of points x and y at the rungs a and b, have the covariance

    k = Matern-5/2(|x - y|) exp(-decay |a - b|)

with a length scale for each dimension, and each rung has its own noise variance. A rung that ranks
trials differently from the next one, or is all noise, therefore gets little influence.

Shapes: N results, C candidates, P points that are being trained, L rungs, D dimensions; F features
of a point, each of which belongs to a dimension.

References:
    Rasmussen and Williams, Gaussian Processes for Machine Learning, MIT Press 2006: equations 4.17
    (the kernel), 2.25 and 2.26 (the prediction), 5.9 (the gradient of the likelihood). Swersky,
    Snoek and Adams, Multi-Task Bayesian Optimization, NeurIPS 2013: a product of kernels. Jones,
    Schonlau and Welch, Efficient Global Optimization of Expensive Black-Box Functions, 1998: the
    expected improvement. Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation
    Learning, 1993: the step sizes of the fit.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Dimension

__all__ = ["GaussianProcess", "embed", "log_improvement"]

Array = NDArray[np.float64]

_LENGTH, _LENGTH_SPREAD = 0.7, 1.0
"""Prior mean of a length scale, times the root of D; prior deviation of its logarithm."""
_DECAY, _DECAY_SPREAD = 0.25, 1.0
_NOISE, _NOISE_GROWTH, _NOISE_SPREAD = 0.02, 2.0, 1.2
"""Prior mean of the noise variance at the highest rung, relative to the total; its factor for each
rung below; prior deviation of its logarithm."""
_FLOOR = 1e-6
"""Minimum variance of the noise."""
_STEPS = 25
_STEP, _LEAST_STEP, _MOST_STEP = 0.25, 1e-3, 0.8
_FASTER, _SLOWER = 1.3, 0.5
"""Factors of a step: while the sign of the gradient is unchanged, and when it changes."""
_FARTHEST = 3.0
"""Maximum distance from the prior mean, in prior deviations."""
_SHAPE_DIGITS = 3
_GRADIENT_DIGITS = 9
"""Decimals: sums differ between machines in the sixteenth, gradients in the twelfth."""
_APART = 0.5
"""Its square is half the squared distance of two categories; also the offset of a missing leaf."""


def embed(dimensions: Sequence[Dimension], points: Array) -> tuple[Array, NDArray[np.intp]]:
    """Return features of points whose distances are those of the points.

    A number is its coordinate. Two categories are 0.7 apart. A leaf that does not exist has the
    middle coordinate, and an offset of half a unit.

    Args:
        dimensions: Dimensions of the space; D of them.
        points: (N, D); NaN for a leaf that does not exist.

    Returns:
        (N, F) features; and (F,), the dimension of each feature.
    """
    columns: list[Array] = []
    owners: list[int] = []
    for index, dimension in enumerate(dimensions):
        at = points[:, index]
        missing = np.isnan(at)
        if dimension.kind == "categorical":
            categories = np.unique(at[~missing])
            feature_columns = [_APART * (at == category) for category in categories]
        else:
            feature_columns = [np.where(missing, 0.5, at)]
            if dimension.when:
                feature_columns.append(_APART * missing)
        columns += feature_columns
        owners += [index] * len(feature_columns)
    features = np.array(columns, dtype=float).reshape(len(columns), len(points)).T
    return features, np.array(owners, dtype=np.intp)


class GaussianProcess:
    """Gaussian process over the results of all rungs.

    Args:
        features: (N, F).
        owners: (F,): the dimension of each feature.
        dimensions: D.
        rungs: (N,): the rung of each result.
        scores: (N,): the results; smaller is better.
        shape: Hyperparameters of another process with the same rungs; None to fit them.
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
        used = features.any(axis=0)  # a category without results adds nothing
        self._used, self._used_owners = features[:, used], owners[used]
        self._rungs = rungs
        centred = scores - scores.mean()
        self._scores = centred / (centred.std() or 1.0)
        levels = np.unique(rungs)  # (L,)
        self._rung_indicator = (rungs == levels[:, None]).astype(float)  # (L, N)
        self._rung_distance = np.abs(rungs[:, None] - rungs)  # (N, N): rungs
        self._prior_mean = np.log(
            [_LENGTH * math.sqrt(max(dimensions, 1))] * dimensions
            + [_DECAY]
            + [_NOISE * _NOISE_GROWTH ** (levels[-1] - level) for level in levels]
        )
        spreads = [_LENGTH_SPREAD] * dimensions + [_DECAY_SPREAD] + [_NOISE_SPREAD] * len(levels)
        self._prior_std = np.array(spreads)
        self.shape = self._fit() if shape is None else shape
        """Logarithms of D length scales, the decay, and L variances of noise; lowest rung first."""

    def _fit(self) -> Array:
        """Maximize the posterior of the hyperparameters with a few sign-gradient steps (Rprop)."""
        shape, step = self._prior_mean.copy(), np.full(len(self._prior_mean), _STEP)
        lowest, best, last_gradient = math.inf, shape, np.zeros(len(shape))
        max_offset = _FARTHEST * self._prior_std
        for _ in range(_STEPS):
            loss, gradient = self._loss(shape)
            if loss < lowest:
                lowest, best = loss, shape
            same_sign = gradient * last_gradient  # > 0 if the sign is unchanged
            step = np.where(
                same_sign > 0, step * _FASTER, np.where(same_sign < 0, step * _SLOWER, step)
            )
            step = step.clip(_LEAST_STEP, _MOST_STEP)
            shape = shape - np.sign(gradient) * step
            shape = shape.clip(self._prior_mean - max_offset, self._prior_mean + max_offset)
            last_gradient = gradient
        return best.round(_SHAPE_DIGITS)

    def _loss(self, shape: Array) -> tuple[float, Array]:
        """Return the negative log posterior of a shape, and its gradient.

        The scale and the mean of all scores are the most likely ones.
        """
        d, n = self._dimensions, len(self._scores)
        noise = np.exp(shape[d + 1 :])  # (L,)
        r = _distances(shape[self._used_owners], self._used, self._used)  # (N, N)
        falls, along = np.exp(-r), _rung_kernel(shape[d], self._rung_distance)
        k = _matern(r) * along
        inverse = np.linalg.inv(k + np.diag(noise @ self._rung_indicator + _FLOOR))
        weights, variance = self._weights(inverse.sum(axis=1), inverse @ self._scores)
        _, determinant = np.linalg.slogdet(inverse)
        off = (shape - self._prior_mean) / self._prior_std
        loss = 0.5 * (n * math.log(variance) - float(determinant) + float(off @ off))
        slope = inverse - np.outer(weights, weights) / variance  # (N, N)
        gradient = off / self._prior_std
        # Half the sum over i, j of across[i, j] (x_i - x_j)^2 for each feature. As `across` is
        # symmetric, that needs no (N, N, F) array.
        across = slope * along * (1 + r) * falls * (5 / 3)
        sums = across.sum(axis=1) @ self._used**2
        sums -= (self._used * (across @ self._used)).sum(axis=0)
        gradient[:d] += np.exp(-2 * shape[:d]) * np.bincount(self._used_owners, sums, d)
        gradient[d] -= 0.5 * math.exp(shape[d]) * float((slope * k * self._rung_distance).sum())
        gradient[d + 1 :] += 0.5 * noise * (self._rung_indicator @ np.diag(slope))
        return loss, gradient.round(_GRADIENT_DIGITS)

    def predict(self, rung: int, candidates: Array, training: Array) -> tuple[Array, Array, float]:
        """Predict the scores of candidates at a rung.

        Args:
            rung: The highest rung of the results.
            candidates: (C, F).
            training: (P, F): points that are being trained to that rung. They are assumed to reach
                their expected scores, so that no second trial is proposed at the same point.

        Returns:
            (C,) expected scores, (C,) their standard deviations, and the lowest expected score of
            any result's point; all on one scale.
        """
        n, p, d = len(self._scores), len(training), self._dimensions
        features = np.concatenate([self._features, training, candidates])
        rungs = np.concatenate([self._rungs, np.full(p, rung)])
        noise = np.exp(self.shape[d + 1 :])
        noises = np.concatenate([noise @ self._rung_indicator, np.full(p, noise[-1])]) + _FLOOR
        lengths = self.shape[self._owners]  # (F,)
        distances = _distances(lengths, features, features[: n + p])  # (N + P + C, N + P)
        point_kernel = _matern(distances)
        # As if all results were at that rung.
        at_rung = point_kernel * _rung_kernel(self.shape[d], np.abs(rung - rungs))
        kernel = point_kernel[: n + p] * _rung_kernel(self.shape[d], np.abs(rungs[:, None] - rungs))
        kernel[np.diag_indices_from(kernel)] += noises
        sides = np.stack([np.ones(n), self._scores], axis=1)
        ones, solved = np.linalg.solve(kernel[:n, :n], sides).T
        weights, variance = self._weights(ones, solved)
        expected = _mean(ones, solved) + at_rung[:, :n] @ weights  # (N + P + C,)
        cross = at_rung[n + p :]  # (C, N + P)
        remaining_variance = 1 - (cross * np.linalg.solve(kernel, cross.T).T).sum(axis=1)
        deviation = np.sqrt(variance * remaining_variance.clip(_FLOOR))
        return expected[n + p :], deviation, float(expected[:n].min())

    def _weights(self, ones: Array, solved: Array) -> tuple[Array, float]:
        """Return the inverse kernel matrix times the residuals, and the residuals' variance.

        Args:
            ones: (N,): the inverse times ones.
            solved: (N,): the inverse times the scores.
        """
        mean = _mean(ones, solved)
        weights = solved - mean * ones
        variance = float((self._scores - mean) @ weights) / len(weights)
        return weights, max(variance, _FLOOR)


def _distances(lengths: Array, a: Array, b: Array) -> Array:
    """Return the distances of all pairs, in length scales, times the root of 5.

    Args:
        lengths: (F,), logarithms of the length scales.
        a: (K, F).
        b: (L, F).

    Returns:
        (K, L)
    """
    scale = math.sqrt(5) * np.exp(-lengths)
    a, b = a * scale, b * scale
    squares: Array = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)
    distances: Array = np.sqrt((squares - 2 * a @ b.T).clip(0))
    return distances


def _matern(r: Array) -> Array:
    """Return the Matern kernel with smoothness 5/2, at distances times the root of 5."""
    k: Array = (1 + r + r * r / 3) * np.exp(-r)
    return k


def _rung_kernel(decay: float, between: Array) -> Array:
    """Return the correlation over a distance in rungs; ``decay`` is a logarithm."""
    correlation: Array = np.exp(-math.exp(decay) * between)
    return correlation


def _mean(ones: Array, solved: Array) -> float:
    """Return the generalized least-squares mean of the scores."""
    return float(solved.sum() / ones.sum())


def log_improvement(mean: Array, deviation: Array, lowest: float) -> Array:
    """Return the logarithm of the expected improvement over the lowest score.

    Args:
        mean: (C,), expected scores.
        deviation: (C,), above 0.
        lowest: Best score so far.

    Returns:
        (C,)
    """
    z = (lowest - mean) / deviation
    near = z.clip(-5)
    below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in near])
    improved = np.exp(-near * near / 2) / math.sqrt(2 * math.pi) + near * below
    far = np.minimum(z, -5)  # asymptotic lower bound of the tail
    tail = -far * far / 2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(-far)
    tail += np.log1p(-3 / far**2)
    gain: Array = np.where(z > -5, np.log(improved.clip(1e-300)), tail) + np.log(deviation)
    return gain
