"""Where the next trial should lie: what is known of the space, and a draw from it.

Candidates are drawn where good trials lie, beside the best, and anywhere. Of these mostly a
Gaussian process over all rungs takes the one that promises most; now and then the ratio of two
densities does, which supposes less: neither misses for long what the other would find.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from zerolab.schema.space import Dimension, Point, Space
from zerolab.searcher.tpe.candidates import anywhere, moved, rows_of, snapped
from zerolab.searcher.tpe.gaussian import GaussianProcess, embed, log_improvement
from zerolab.searcher.tpe.ladder import Ladder
from zerolab.searcher.tpe.parzen import Mixture
from zerolab.searcher.tpe.scores import Scores, on_one_scale

__all__ = ["Proposer"]

Array = NDArray[np.float64]

_BLAS = ThreadpoolController()
"""Of what numpy has loaded. Its threads gain nothing with matrices of a hundred rows, take cores
from trials, and add up in an order that depends on how many there are."""
_ALONE = threading.Lock()
"""The limit is the whole process', and is taken back by whoever has set it."""

_UNIFORM = 0.05
"""Part of the trials that are drawn from the whole space."""
_BY_DENSITIES = 0.33
"""Part of the others that the ratio of two densities chooses; the process chooses the rest."""
_ENOUGH = 8
"""Finite values that a rung must have before there is anything to learn from."""
_ENOUGH_ABOVE = 4
"""Finite values that a rung must have before the process says what trials come to there."""
_GOOD, _MOST_GOOD = 0.1, 25
_MOST_BAD = 100
_CANDIDATES = 24
"""Drawn from the density of the good; the process has these besides:"""
_MOVED, _ANYWHERE = 48, 24
_FEWEST_MOVED_FROM = 3
_DIGITS = 6
"""Decimals in which gains are compared."""
_RESULTS = 100
"""Most that the process is made of; and of them of one rung, while others have some:"""
_LEAST_OF_A_RUNG = 20
_GROWTH = 1.12
"""So many times as many results make its shape be fitted anew."""
_MOST_FEATURES = 3000
"""In a space of more the densities choose always: a fit takes as long as there are features."""
_MOST_PENDING = 200
"""Of the trials that nothing is known of the newest count; the time grows with their cube."""


@dataclass(frozen=True)
class _Results:
    """What a process is made of; N results."""

    rung: int
    """The highest rung that says enough."""
    best: list[int]
    """The best trials there."""
    trials: list[int]
    """Of each result."""
    rungs: NDArray[np.int64]
    """(N,)"""
    scores: Array
    """(N,)"""
    known: int
    """How many results there are in all."""


class Proposer:
    """Draws points that promise most.

    Args:
        space: Where points may lie.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._is_wide = sum(map(_features, space.dimensions)) > _MOST_FEATURES
        self._shape: Array | None = None
        self._fitted_to: tuple[list[int], int] = ([], 0)  # rungs, and how many results there were

    def propose(
        self,
        ladder: Ladder,
        points: Mapping[int, Point],
        pending: Sequence[int],
        rng: Random,
    ) -> Point:
        """Draw a promising point.

        Args:
            ladder: What is known of trials.
            points: Where the trials lie, by id.
            pending: Trials that nothing is known of yet, oldest first.
            rng: The new trial's own randomness.

        Returns:
            A coordinate for each dimension.
        """
        known = ladder.best_known(_ENOUGH)
        if rng.random() < _UNIFORM or known is None or not self._space.dimensions:
            return self._space.point(rng)
        with _ALONE, _BLAS.limit(limits=1, user_api="blas"):
            return self._promising(ladder, points, pending, known, rng)

    def _promising(
        self,
        ladder: Ladder,
        points: Mapping[int, Point],
        pending: Sequence[int],
        judged: tuple[list[int], int],
        rng: Random,
    ) -> Point:
        known, finite = judged
        pending = pending[-_MOST_PENDING:]
        count = min(_good(len(known)), finite)
        good = self._mixture(points, known[:count])
        drawn = snapped(self._space.dimensions, good.draw(rng, _CANDIDATES))
        if rng.random() < _BY_DENSITIES or self._is_wide:
            rest = [*known[count:], *ladder.left_behind(known)]
            if len(rest) > _MOST_BAD:
                rest = rng.sample(rest, _MOST_BAD)
            bad = self._mixture(points, [*rest, *pending])
            gain = good.log_density(drawn) - bad.log_density(drawn)
        else:
            results = _results(ladder)
            drawn = self._more(drawn, self._rows(points, results.best), rng)
            gain = self._improvement(results, points, pending, drawn)
        # Of those that are alike the first, on machines too whose sums differ in their last digits.
        chosen = drawn[int(gain.round(_DIGITS).argmax())].tolist()
        return self._space.snap([None if math.isnan(at) else at for at in chosen])

    def _rows(self, points: Mapping[int, Point], trials: Sequence[int]) -> Array:
        return rows_of([points[trial_id] for trial_id in trials], len(self._space.dimensions))

    def _mixture(self, points: Mapping[int, Point], trials: Sequence[int]) -> Mixture:
        return Mixture(self._space.dimensions, self._rows(points, trials))

    def _more(self, drawn: Array, best: Array, rng: Random) -> Array:
        """Candidates beside the best, and anywhere, after those that were drawn."""
        dimensions = self._space.dimensions
        beside = moved(dimensions, best, _MOVED, rng)
        others = np.concatenate([beside, anywhere(dimensions, _ANYWHERE, rng)])
        return np.concatenate([drawn, snapped(dimensions, others)])

    def _improvement(
        self,
        results: _Results,
        points: Mapping[int, Point],
        pending: Sequence[int],
        candidates: Array,
    ) -> Array:
        """The logarithm of how much each candidate is expected to be better than what there is."""
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
        found = process.predict(results.rung, features[n + p :], features[n : n + p])
        return log_improvement(*found)

    def _shape_for(self, results: _Results) -> Array | None:
        """The shape that was fitted last; None when it is another process, or there is more now."""
        rungs, known = self._fitted_to
        now = np.unique(results.rungs).tolist()
        if rungs == now and known <= results.known < known * _GROWTH:
            return self._shape
        self._fitted_to = now, results.known
        return None


def _features(dimension: Dimension) -> int:
    """How many features of a dimension a process is fitted to, at most."""
    if dimension.kind == "categorical":
        return min(dimension.size, _RESULTS)
    return 2 if dimension.when else 1


def _good(known: int) -> int:
    """How many of so many trials are good."""
    return min(math.ceil(_GOOD * known), _MOST_GOOD)


def _results(ladder: Ladder) -> _Results:
    """What a process is made of: of the rungs that are trusted, from the highest one down.

    Half of what a rung gives are its best, the others stand evenly among all the rest.
    """
    values = ladder.known()
    finite = [sum(map(math.isfinite, there.values())) for there in values]
    trusted = [rung for rung in reversed(ladder.trusted()) if values[rung]]  # highest first
    rung = next(rung for rung in trusted if finite[rung] >= _ENOUGH_ABOVE)
    scored = on_one_scale(values)
    levels = trusted[trusted.index(rung) :]
    trials: list[int] = []
    rungs: list[int] = []
    scores: list[float] = []
    for level in levels:
        left = _RESULTS - len(trials)
        most = left if level == levels[-1] else max(left // 2, min(left, _LEAST_OF_A_RUNG))
        ids, found = _thinned(scored[level], most)
        trials += ids.tolist()
        rungs += [level] * len(ids)
        scores += found.tolist()
    ids, _ = scored[rung]
    best = ids[: min(max(_FEWEST_MOVED_FROM, _good(len(ids))), finite[rung])].tolist()
    known = sum(len(values[level]) for level in levels)
    return _Results(rung, best, trials, np.array(rungs), np.array(scores), known)


def _thinned(scored: Scores, most: int) -> Scores:
    ids, scores = scored
    if len(ids) <= most:
        return scored
    half = most // 2
    others = np.linspace(half, len(ids) - 1, most - half).round().astype(int)
    picked = np.concatenate([np.arange(half), others])
    return ids[picked], scores[picked]
