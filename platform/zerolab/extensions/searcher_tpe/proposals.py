"""Proposal of the next trial from the results so far.

Candidates are drawn from the density of good trials, near the best ones, and at random. Mostly a
Gaussian process over all rungs chooses the most promising one. Sometimes the ratio of two densities
chooses, which makes fewer assumptions: each covers the blind spots of the other.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from zerolab.extensions.searcher_tpe.candidates import perturb, sample_uniform, snap_rows, to_rows
from zerolab.extensions.searcher_tpe.gaussian import GaussianProcess, embed, log_improvement
from zerolab.extensions.searcher_tpe.ladder import Ladder
from zerolab.extensions.searcher_tpe.parzen import Mixture
from zerolab.extensions.searcher_tpe.scores import Scores, normalize_rungs
from zerolab.schema.space import Dimension, Point, Space

__all__ = ["Proposer"]

Array = NDArray[np.float64]

_BLAS = ThreadpoolController()
"""BLAS of numpy. Its threads gain nothing with matrices of a hundred rows, take cores from trials,
and change the order of sums with their number."""
_BLAS_LOCK = threading.Lock()
"""The limit is the whole process', and is taken back by whoever has set it."""

_UNIFORM = 0.05
"""Fraction of the trials that are drawn from the whole space."""
_BY_DENSITIES = 0.33
"""Fraction of the others that the density ratio chooses; the Gaussian process chooses the rest."""
_ENOUGH = 8
"""Finite values that a rung must have before a model is used."""
_ENOUGH_ABOVE = 4
"""Finite values that a rung must have before the Gaussian process predicts it."""
_GOOD, _MOST_GOOD = 0.1, 25
_MOST_BAD = 100
_CANDIDATES = 24
"""Drawn from the density of good trials; the Gaussian process gets these in addition:"""
_MOVED, _ANYWHERE = 48, 24
_FEWEST_MOVED_FROM = 3
_DIGITS = 6
"""Decimals in which gains are compared."""
_RESULTS = 100
"""Maximum number of results of the process; and of one rung, when others have some:"""
_LEAST_OF_A_RUNG = 20
_GROWTH = 1.12
"""Growth of the number of results after which the hyperparameters are fitted again."""
_MOST_FEATURES = 3000
"""In larger spaces the densities always choose: the time of a fit grows with the features."""
_MOST_PENDING = 200
"""Maximum number of unjudged trials that count, newest first; the time grows with their cube."""


@dataclass(frozen=True)
class _TrainingSet:
    """Input of a Gaussian process: N results."""

    rung: int
    """The highest rung with enough results."""
    best: list[int]
    """The best trials of that rung."""
    trials: list[int]
    """Trial of each result."""
    rungs: NDArray[np.int64]
    """(N,)"""
    scores: Array
    """(N,)"""
    total: int
    """Total number of results, before the limit."""


class Proposer:
    """Proposes the most promising points.

    Args:
        space: Search space.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._is_wide = sum(map(_features, space.dimensions)) > _MOST_FEATURES
        self._shape: Array | None = None
        self._fitted_to: tuple[list[int], int] = ([], 0)  # rungs and number of results

    def propose(
        self,
        ladder: Ladder,
        points: Mapping[int, Point],
        pending: Sequence[int],
        rng: Random,
    ) -> Point:
        """Propose a promising point.

        Args:
            ladder: Results of the trials.
            points: Points of the trials, by id.
            pending: Trials without any result yet, oldest first.
            rng: The new trial's own generator.

        Returns:
            A coordinate for each dimension.
        """
        judged = ladder.best_trials(_ENOUGH)
        if rng.random() < _UNIFORM or judged is None or not self._space.dimensions:
            return self._space.point(rng)
        with _BLAS_LOCK, _BLAS.limit(limits=1, user_api="blas"):
            return self._promising(ladder, points, pending, judged, rng)

    def _promising(
        self,
        ladder: Ladder,
        points: Mapping[int, Point],
        pending: Sequence[int],
        judged: tuple[list[int], int],
        rng: Random,
    ) -> Point:
        ranked, finite = judged
        pending = pending[-_MOST_PENDING:]
        count = min(_num_good(len(ranked)), finite)
        good = self._mixture(points, ranked[:count])
        drawn = snap_rows(self._space.dimensions, good.draw(rng, _CANDIDATES))
        if rng.random() < _BY_DENSITIES or self._is_wide:
            bad_ids = [*ranked[count:], *ladder.judged_below(ranked)]
            if len(bad_ids) > _MOST_BAD:
                bad_ids = rng.sample(bad_ids, _MOST_BAD)
            bad = self._mixture(points, [*bad_ids, *pending])
            gain = good.log_density(drawn) - bad.log_density(drawn)
        else:
            results = _training_set(ladder)
            drawn = self._add_candidates(drawn, self._rows(points, results.best), rng)
            gain = self._improvement(results, points, pending, drawn)
        # Rounded, so that ties give the first on every machine: sums differ in their last digits.
        chosen = drawn[int(gain.round(_DIGITS).argmax())].tolist()
        return self._space.snap([None if math.isnan(at) else at for at in chosen])

    def _rows(self, points: Mapping[int, Point], trials: Sequence[int]) -> Array:
        return to_rows([points[trial_id] for trial_id in trials], len(self._space.dimensions))

    def _mixture(self, points: Mapping[int, Point], trials: Sequence[int]) -> Mixture:
        return Mixture(self._space.dimensions, self._rows(points, trials))

    def _add_candidates(self, drawn: Array, best: Array, rng: Random) -> Array:
        """Append candidates near the best points, and random ones."""
        dimensions = self._space.dimensions
        near = perturb(dimensions, best, _MOVED, rng)
        added = np.concatenate([near, sample_uniform(dimensions, _ANYWHERE, rng)])
        return np.concatenate([drawn, snap_rows(dimensions, added)])

    def _improvement(
        self,
        results: _TrainingSet,
        points: Mapping[int, Point],
        pending: Sequence[int],
        candidates: Array,
    ) -> Array:
        """Return the logarithm of the expected improvement of each candidate."""
        n, p = len(results.trials), len(pending)
        rows = self._rows(points, [*results.trials, *pending])
        dimensions = self._space.dimensions
        features, owners = embed(dimensions, np.concatenate([rows, candidates]))
        process = GaussianProcess(
            features[:n],
            owners,
            len(dimensions),
            results.rungs,
            results.scores,
            shape=self._shape_for(results),
        )
        self._shape = process.shape
        prediction = process.predict(results.rung, features[n + p :], features[n : n + p])
        return log_improvement(*prediction)

    def _shape_for(self, results: _TrainingSet) -> Array | None:
        """Return the last fitted shape; None when the rungs differ or the results have grown."""
        rungs, results_then = self._fitted_to
        now = np.unique(results.rungs).tolist()
        if rungs == now and results_then <= results.total < results_then * _GROWTH:
            return self._shape
        self._fitted_to = now, results.total
        return None


def _features(dimension: Dimension) -> int:
    """Return the maximum number of features of a dimension."""
    if dimension.kind == "categorical":
        return min(dimension.size, _RESULTS)
    return 2 if dimension.when else 1


def _num_good(count: int) -> int:
    """Return how many trials count as good."""
    return min(math.ceil(_GOOD * count), _MOST_GOOD)


def _training_set(ladder: Ladder) -> _TrainingSet:
    """Select results from the trusted rungs, the highest first.

    Half of a rung's results are its best; the others are spread evenly over the rest.
    """
    values = ladder.values_by_rung()
    finite = [sum(map(math.isfinite, by_trial.values())) for by_trial in values]
    trusted = [rung for rung in reversed(ladder.trusted_rungs()) if values[rung]]  # highest first
    rung = next(rung for rung in trusted if finite[rung] >= _ENOUGH_ABOVE)
    scored = normalize_rungs(values)
    levels = trusted[trusted.index(rung) :]
    trials: list[int] = []
    rungs: list[int] = []
    scores: list[float] = []
    for level in levels:
        remaining = _RESULTS - len(trials)
        limit = (
            remaining
            if level == levels[-1]
            else max(remaining // 2, min(remaining, _LEAST_OF_A_RUNG))
        )
        ids, level_scores = _subsample(scored[level], limit)
        trials += ids.tolist()
        rungs += [level] * len(ids)
        scores += level_scores.tolist()
    ids, _ = scored[rung]
    best = ids[: min(max(_FEWEST_MOVED_FROM, _num_good(len(ids))), finite[rung])].tolist()
    total = sum(len(values[level]) for level in levels)
    return _TrainingSet(rung, best, trials, np.array(rungs), np.array(scores), total)


def _subsample(scored: Scores, limit: int) -> Scores:
    ids, scores = scored
    if len(ids) <= limit:
        return scored
    half = limit // 2
    spread = np.linspace(half, len(ids) - 1, limit - half).round().astype(int)
    picked = np.concatenate([np.arange(half), spread])
    return ids[picked], scores[picked]
