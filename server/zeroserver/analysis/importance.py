"""Which hyperparameters matter: what a forest loses when one of them is shuffled.

numpy is loaded when it is first asked for: a server that nobody asks does without.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection

from zeroserver.analysis.columns import Row, Value, names
from zeroserver.store.database import raw_rows

__all__ = ["LEAST_TRIALS", "METHOD", "Found", "Importances", "importance", "state_of"]

LEAST_TRIALS = 10
"""With a finite result, and different values."""

_MOST_TRIALS = 3000
"""That a forest learns from; of more, so many are drawn."""
_BINS = 32
"""Codes of an ordered hyperparameter: its quantiles."""
_KEPT = 64
_THREADS = 2
_LONG_S = 0.5
"""Processor time of a result that is kept for a while although trials change."""
_RARELY = 20.0
"""Times its processor time."""

METHOD = (
    "Permutation importance, out of bag, on a random forest of 48 regression trees (Breiman, "
    "2001). The forest learns each trial's rank by its best validation from its hyperparameters; "
    "ranks, so that one diverged trial does not decide. A hyperparameter's importance is half of "
    "the error that comes in when its values are shuffled among the trials that a tree has not "
    "seen, as a share of the variance: an estimate of its total effect, alone and together with "
    "others (the total Sobol index). It cannot tell cause from habit: hyperparameters that the "
    "searcher changed together, or one that exists only for a value of another, share what they "
    "explain. Where it searched little, little is seen. And trials are compared by their best "
    "validation although some were stopped early."
)


class Found(NamedTuple):
    """Importance of each hyperparameter that differs between trials, the largest first."""

    trials: int
    """With a result."""
    explained: float | None
    """R2 of the forest, out of bag."""
    shares: list[tuple[str, float, float]]
    """Name, importance and its standard error."""
    problem: str | None = None
    """Why there are none."""


def importance(rows: Sequence[Row], *, smaller_is_better: bool) -> Found:
    """Find out which hyperparameters matter for the best validation.

    Args:
        rows: All trials of an experiment.
        smaller_is_better: Whether the smallest validation has the first rank.
    """
    done = [row for row in rows if _finite(row.values["best_validation"])]
    if len(done) < LEAST_TRIALS:
        told = f"at least {LEAST_TRIALS} trials with a result are needed, there are {len(done)}"
        return Found(len(done), None, [], told)
    columns = [(name, [row.hparams.get(name) for row in done]) for name in names(done)]
    differ = [(name, values) for name, values in columns if len(set(map(repr, values))) > 1]
    if not differ:
        return Found(len(done), None, [], "all trials have the same hyperparameters")
    target = [float(row.values["best_validation"] or 0.0) for row in done]
    if len(set(target)) == 1:
        return Found(len(done), None, [], "all trials have the same result")
    return _learn(differ, [each if smaller_is_better else -each for each in target])


def _finite(value: Value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _learn(columns: Sequence[tuple[str, Sequence[Value]]], target: Sequence[float]) -> Found:
    import numpy as np

    from zeroserver.analysis.forest import Forest

    _, ranks = np.unique(np.array(target), return_inverse=True)
    coded = [_coded(values) for _, values in columns]
    codes = np.array([each[0] for each in coded]).T  # (N, F)
    categories = np.array([each[1] for each in coded])
    if len(target) > _MOST_TRIALS:
        drawn = np.random.default_rng(0).choice(len(target), _MOST_TRIALS, replace=False)
        codes, ranks = codes[drawn], ranks[drawn]
    permuted = Forest(codes, ranks.astype(float), categories).permuted()
    shares = [
        (name, max(0.0, float(loss)), float(spread))
        for (name, _), loss, spread in zip(columns, permuted.loss, permuted.spread, strict=True)
    ]
    shares.sort(key=lambda share: (-share[1], share[0]))
    return Found(len(target), permuted.explained, shares)


def _coded(values: Sequence[Value]) -> tuple[Sequence[int], bool]:
    """Write values as small integers, -1 for missing ones; and whether they have no order."""
    import numpy as np

    there = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in there):
        numbers = np.array([np.nan if value is None else float(value) for value in values])
        edges = np.unique(np.nanquantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
        codes = np.searchsorted(edges, numbers, side="left")
        return np.where(np.isnan(numbers), -1, codes).tolist(), False
    kinds = {value: code for code, value in enumerate(dict.fromkeys(map(repr, there)))}
    return [-1 if value is None else kinds[repr(value)] for value in values], True


def state_of(connection: Connection, experiment_id: int) -> int:
    """Return a number that changes with the trials of an experiment and their results."""
    query = "SELECT id, best_validation FROM trials WHERE experiment_id = ? ORDER BY id"
    return hash(tuple(raw_rows(connection, query, (experiment_id,))))


@dataclass(frozen=True)
class _Kept:
    state: int
    found: Found
    fresh_until: float
    """Monotonic time until which it is good although trials have changed."""


class Importances:
    """Importance in several experiments, computed when it is requested and trials have changed.

    Two threads of its own compute, so that requests for one experiment neither hold up those for
    another nor take the threads that answer everything else. An experiment is computed once at a
    time: others who request it meanwhile get the same result. One that takes long is computed
    less often.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._going: dict[int, asyncio.Task[Found]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "importance")

    async def of(self, experiment_id: int, state: int, compute: Callable[[], Found]) -> Found:
        """Return the importance in an experiment; called by the event loop.

        Args:
            experiment_id: Which.
            state: What :func:`state_of` says.
            compute: Computes it; any thread may.
        """
        kept = self._kept.get(experiment_id)
        if kept is not None and (kept.state == state or time.monotonic() < kept.fresh_until):
            return kept.found
        task = self._going.get(experiment_id)
        if task is None:
            task = asyncio.create_task(self._compute(experiment_id, state, compute))
            task.add_done_callback(_note_failure)
            self._going[experiment_id] = task
        return await asyncio.shield(task)  # who goes away leaves it to the others

    async def _compute(self, experiment_id: int, state: int, compute: Callable[[], Found]) -> Found:
        loop = asyncio.get_running_loop()
        try:
            found, spent = await loop.run_in_executor(self._threads, _timed, compute)
            fresh_until = time.monotonic() + (_RARELY * spent if spent > _LONG_S else 0.0)
            self._kept[experiment_id] = _Kept(state, found, fresh_until)
            self._kept.move_to_end(experiment_id)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found
        finally:
            del self._going[experiment_id]


def _note_failure(task: "asyncio.Task[Found]") -> None:
    """Look at a task's error, which nobody may wait for any more."""
    if not task.cancelled():
        task.exception()


def _timed(compute: Callable[[], Found]) -> tuple[Found, float]:
    """Compute; return the result and the processor time."""
    begin = time.thread_time()
    found = compute()
    return found, time.thread_time() - begin
