"""Small random forest of regression trees on encoded features, in numpy.

Features are codes: small integers from 0, or -1 for a missing value. An ordered feature is split at
a threshold. Categories are split by their means: those with smaller means go to one side, which is
optimal among all two-way splits for squared errors.

Symbols: N samples, F features, B maximum number of codes of a feature, including the missing value.

References:
    Breiman: Random forests. Machine Learning 45 (2001).
    Fisher: On grouping for maximum homogeneity. JASA 53 (1958): the order of categories.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Forest", "Permuted"]

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

_NUM_TREES = 48
_MAX_DEPTH = 8
_MIN_SAMPLES_LEAF = 3
"""Minimum number of samples in a leaf."""


@dataclass(frozen=True)
class _Tree:
    """Tree with its nodes in arrays; a leaf has feature -1."""

    feature: Codes  # (nodes,)
    left: NDArray[np.bool_]  # (nodes, B): whether a code goes left
    child: Codes  # (nodes, 2): left and right
    value: Floats  # (nodes,)

    def predict(self, codes: Codes) -> Floats:
        """Predict targets, shape (N,), from shifted codes (0 is missing), shape (N, F)."""
        at = np.zeros(len(codes), dtype=np.int64)
        for _ in range(_MAX_DEPTH + 1):
            feature = self.feature[at]
            code = codes[np.arange(len(codes)), np.maximum(feature, 0)]
            side = np.where(self.left[at, code], 0, 1)
            at = np.where(feature < 0, at, self.child[at, side])
        return self.value[at]


@dataclass(frozen=True)
class Permuted:
    """Loss of the forest when each feature is permuted, on out-of-bag samples."""

    explained: float
    """Out-of-bag R2 of the forest: 1 - squared error / variance."""
    loss: Floats
    """Shape (F,): half of the decrease of R2 when a feature is permuted, mean over the trees.

    The half estimates the total-effect Sobol index: a permutation draws a second, independent
    value, and the difference of two independent values has twice the variance.
    """
    spread: Floats
    """Shape (F,): standard error of ``loss``."""


class Forest:
    """Random forest of trees grown on bootstrap samples.

    Args:
        codes: Shape (N, F).
        target: Shape (N,).
        categories: Shape (F,): whether the codes of a feature have no order.
        seed: Random seed; the same seed yields the same forest.
    """

    def __init__(
        self, codes: Codes, target: Floats, categories: NDArray[np.bool_], seed: int = 0
    ) -> None:
        self._codes = codes + 1  # missing is 0
        self._target = target
        self._categories = categories
        self._bins = int(self._codes.max(initial=0)) + 1
        self._random = np.random.default_rng(seed)
        self._trees: list[tuple[_Tree, Codes]] = []
        for _ in range(_NUM_TREES):
            drawn = self._random.integers(0, len(target), len(target))
            unseen = np.setdiff1d(np.arange(len(target)), drawn)
            self._trees.append((self._grow(drawn), unseen))

    def _grow(self, drawn: Codes) -> _Tree:
        feature: list[int] = []
        goes_left: list[NDArray[np.bool_]] = []
        child: list[list[int]] = []
        value: list[float] = []
        todo = [(drawn, 0, -1, 0)]
        while todo:
            rows, depth, parent, side = todo.pop()
            at = len(feature)
            if parent >= 0:
                child[parent][side] = at
            split = (
                self._split(rows)
                if depth < _MAX_DEPTH and len(rows) >= 2 * _MIN_SAMPLES_LEAF
                else None
            )
            feature.append(-1 if split is None else split[0])
            goes_left.append(np.zeros(self._bins, dtype=bool) if split is None else split[1])
            child.append([at, at])
            value.append(float(self._target[rows].mean()))
            if split is not None:
                goes = split[1][self._codes[rows, split[0]]]
                todo += [(rows[goes], depth + 1, at, 0), (rows[~goes], depth + 1, at, 1)]
        arrays = np.array(feature), np.array(goes_left), np.array(child), np.array(value)
        return _Tree(*arrays)

    def _split(self, rows: Codes) -> tuple[int, NDArray[np.bool_]] | None:
        """Return the best split: its feature, and whether each code goes left, shape (B,)."""
        features = self._codes.shape[1]
        tried = self._random.permutation(features)[: max(1, -(-features * 2 // 3))]
        target = self._target[rows] - self._target[rows].mean()
        flat = (self._codes[rows][:, tried] + self._bins * np.arange(len(tried))).ravel()
        size = self._bins * len(tried)
        residuals = np.repeat(target, len(tried))
        count = np.bincount(flat, minlength=size).reshape(len(tried), -1)  # (tried, B)
        total = np.bincount(flat, residuals, minlength=size).reshape(len(tried), -1)
        unordered = np.flatnonzero(self._categories[tried])
        mean = total[unordered] / np.maximum(count[unordered], 1)
        order = np.argsort(np.where(count[unordered] > 0, mean, np.inf), axis=1)
        count[unordered] = np.take_along_axis(count[unordered], order, 1)
        total[unordered] = np.take_along_axis(total[unordered], order, 1)
        below, sums = np.cumsum(count, axis=1), np.cumsum(total, axis=1)
        above = len(rows) - below
        # With a mean of 0 both sides have sums of equal size:
        # S²/below + S²/above = S² N/(below above).
        gain = sums * sums / np.maximum(below * above, 1)
        gain[(below < _MIN_SAMPLES_LEAF) | (above < _MIN_SAMPLES_LEAF)] = 0.0
        which, edge = divmod(int(gain.argmax()), self._bins)
        if gain[which, edge] * len(rows) <= 1e-12:
            return None
        goes_left = np.zeros(self._bins, dtype=bool)
        position = np.flatnonzero(unordered == which)
        codes = order[position[0]] if len(position) else np.arange(self._bins)
        goes_left[codes[: edge + 1]] = True
        return int(tried[which]), goes_left

    def permuted(self) -> Permuted:
        """Permute each feature among the out-of-bag samples; return the losses."""
        count, features = self._codes.shape  # features that no tree uses have no loss
        variance = float(self._target.var())
        summed, seen = np.zeros(count), np.zeros(count)
        losses = np.zeros((len(self._trees), features))
        for number, (tree, unseen) in enumerate(self._trees):
            codes, target = self._codes[unseen], self._target[unseen]
            plain = tree.predict(codes)
            summed[unseen] += plain
            seen[unseen] += 1
            error = np.mean((target - plain) ** 2) if len(unseen) else 0.0
            for feature in np.unique(tree.feature[tree.feature >= 0]).tolist():
                original = codes[:, feature].copy()
                codes[:, feature] = self._random.permutation(original)
                wrong = np.mean((target - tree.predict(codes)) ** 2) if len(unseen) else 0.0
                codes[:, feature] = original
                losses[number, feature] = (wrong - error) / (2 * variance)
        evaluated = seen > 0
        errors = (self._target[evaluated] - summed[evaluated] / seen[evaluated]) ** 2
        spread = losses.std(axis=0, ddof=1) / np.sqrt(len(self._trees))
        return Permuted(1 - float(errors.mean()) / variance, losses.mean(axis=0), spread)
