"""Permutation importance of hyperparameters by a random forest.

numpy is imported on the first request, which keeps the server's startup fast.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from zeroserver.analysis.columns import Row, Value, names
from zeroserver.store.database import raw_rows

__all__ = [
    "METHOD",
    "MIN_TRIALS",
    "ImportanceCache",
    "ImportanceResult",
    "importance",
    "trials_fingerprint",
]

MIN_TRIALS = 10
"""Minimum number of trials with a finite result."""

_MAX_TRIALS = 3000
"""Maximum number of trials for a forest; larger numbers are sampled."""
_BINS = 32
"""Number of quantiles, and so codes, of an ordered hyperparameter."""
_MAX_CACHED = 64
_THREADS = 2
_SLOW_S = 0.5
"""CPU time above which a result is reused for a while even if trials change."""
_FRESH_FACTOR = 20.0
"""Such a result is reused for this multiple of its CPU time."""

METHOD = (
    "Permutation importance, out of bag, on a random forest of 48 regression trees (Breiman, "
    "2001). The forest learns each trial's rank by its best validation from its hyperparameters; "
    "ranks limit the effect of a diverged trial. A hyperparameter's importance is half of "
    "the error that is added when its values are shuffled among the trials that a tree has not "
    "seen, as a share of the variance: an estimate of its total effect, alone and together with "
    "others (the total Sobol index). It shows correlation, not cause: hyperparameters that "
    "the searcher changed together, or one that exists only for a value of another, share their "
    "importance. Regions with few trials have little influence. Trials are compared by their best "
    "validation although some were stopped early."
)


class ImportanceResult(NamedTuple):
    """Importance of each hyperparameter that differs between trials, largest first."""

    trials: int
    """Number of trials with a result."""
    explained: float | None
    """Out-of-bag R2 of the forest."""
    shares: list[tuple[str, float, float]]
    """Name, importance and its standard error."""
    problem: str | None = None
    """Reason for an empty result."""


def importance(rows: Sequence[Row], *, smaller_is_better: bool) -> ImportanceResult:
    """Compute the importance of hyperparameters for the best validation.

    Args:
        rows: All trials of an experiment.
        smaller_is_better: Whether the smallest validation has the first rank.
    """
    done = [row for row in rows if _finite(row.values["best_validation"])]
    if len(done) < MIN_TRIALS:
        problem = f"at least {MIN_TRIALS} trials with a result are needed, there are {len(done)}"
        return ImportanceResult(len(done), None, [], problem)
    columns = [(name, [row.hparams.get(name) for row in done]) for name in names(done)]
    differ = [(name, values) for name, values in columns if len(set(map(repr, values))) > 1]
    if not differ:
        return ImportanceResult(len(done), None, [], "all trials have the same hyperparameters")
    target = [float(row.values["best_validation"] or 0.0) for row in done]
    if len(set(target)) == 1:
        return ImportanceResult(len(done), None, [], "all trials have the same result")
    return _learn(differ, [item if smaller_is_better else -item for item in target])


def _finite(value: Value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _learn(
    columns: Sequence[tuple[str, Sequence[Value]]], target: Sequence[float]
) -> ImportanceResult:
    import numpy as np

    from zeroserver.extensions.analysis.forest import Forest

    _, ranks = np.unique(np.array(target), return_inverse=True)
    coded = [_encode(values) for _, values in columns]
    codes = np.array([item[0] for item in coded]).T  # (N, F)
    categories = np.array([item[1] for item in coded])
    if len(target) > _MAX_TRIALS:
        drawn = np.random.default_rng(0).choice(len(target), _MAX_TRIALS, replace=False)
        codes, ranks = codes[drawn], ranks[drawn]
    permuted = Forest(codes, ranks.astype(float), categories).permuted()
    shares = [
        (name, max(0.0, float(loss)), float(spread))
        for (name, _), loss, spread in zip(columns, permuted.loss, permuted.spread, strict=True)
    ]
    shares.sort(key=lambda share: (-share[1], share[0]))
    return ImportanceResult(len(target), permuted.explained, shares)


def _encode(values: Sequence[Value]) -> tuple[Sequence[int], bool]:
    """Encode values as small integers, -1 if missing; also return whether they are unordered."""
    import numpy as np

    present = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        numbers = np.array([np.nan if value is None else float(value) for value in values])
        edges = np.unique(np.nanquantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
        codes = np.searchsorted(edges, numbers, side="left")
        return np.where(np.isnan(numbers), -1, codes).tolist(), False
    kinds = {value: code for code, value in enumerate(dict.fromkeys(map(repr, present)))}
    return [-1 if value is None else kinds[repr(value)] for value in values], True


def trials_fingerprint(connection: Connection, experiment_id: int) -> int:
    """Return a hash of the trials of an experiment and their results."""
    query = "SELECT id, best_validation FROM trials WHERE experiment_id = ? ORDER BY id"
    return hash(tuple(raw_rows(connection, query, (experiment_id,))))


class _CachedResult(msgspec.Struct, frozen=True):
    state: int
    result: ImportanceResult
    fresh_until: float
    """Monotonic time until which the result is reused even if trials change."""


class ImportanceCache:
    """Cache of importance by experiment, recomputed on request after trials have changed.

    Two separate threads compute results, so that other experiments and requests are not blocked.
    Concurrent requests for an experiment share one computation. Slow results are recomputed less
    often.
    """

    def __init__(self) -> None:
        self._cache: OrderedDict[int, _CachedResult] = OrderedDict()
        self._tasks: dict[int, asyncio.Task[ImportanceResult]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "importance")

    async def of(
        self, experiment_id: int, state: int, compute: Callable[[], ImportanceResult]
    ) -> ImportanceResult:
        """Return the importance of an experiment; called on the event loop.

        Args:
            experiment_id: Id of the experiment.
            state: Result of :func:`trials_fingerprint`.
            compute: Function that computes the result; called on another thread.
        """
        cached = self._cache.get(experiment_id)
        if cached is not None and (cached.state == state or time.monotonic() < cached.fresh_until):
            return cached.result
        task = self._tasks.get(experiment_id)
        if task is None:
            task = asyncio.create_task(self._compute(experiment_id, state, compute))
            task.add_done_callback(_retrieve_exception)
            self._tasks[experiment_id] = task
        return await asyncio.shield(task)  # a disconnect must not cancel it for others

    async def _compute(
        self, experiment_id: int, state: int, compute: Callable[[], ImportanceResult]
    ) -> ImportanceResult:
        loop = asyncio.get_running_loop()
        try:
            result, spent = await loop.run_in_executor(self._threads, _timed, compute)
            fresh_until = time.monotonic() + (_FRESH_FACTOR * spent if spent > _SLOW_S else 0.0)
            self._cache[experiment_id] = _CachedResult(state, result, fresh_until)
            self._cache.move_to_end(experiment_id)
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
            return result
        finally:
            del self._tasks[experiment_id]


def _retrieve_exception(task: "asyncio.Task[ImportanceResult]") -> None:
    """Retrieve a task's exception, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _timed(compute: Callable[[], ImportanceResult]) -> tuple[ImportanceResult, float]:
    """Return the result and its CPU time."""
    begin = time.thread_time()
    result = compute()
    return result, time.thread_time() - begin
