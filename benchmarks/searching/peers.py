"""Searchers of others behind our searchers' face: Optuna's, and PASHA."""

import itertools
import math
import warnings
from collections.abc import Mapping
from random import Random
from typing import Any

from benchmarks.searching.objective import EPOCHS
from zerolab.schema.space import Space
from zerolab.searcher import Continue, Create, ExitReason, Operation, Stop

WORKERS = 8


class Endless:
    """Base class of the searchers here, which always have one more trial.

    Args:
        space: What is searched.
        seed: The same seed gives the same trials.
    """

    def __init__(self, space: Mapping[str, Any], seed: int) -> None:
        self.space, self.seed, self.created = Space(space), seed, 0
        self.open: set[int] = set()

    def initial_operations(self) -> list[Operation]:
        return [operation for _ in range(WORKERS) for operation in self.create()]

    def create(self) -> list[Operation]:
        self.created += 1
        self.open.add(self.created)
        return [Create(self.created, self.draw(self.created), 0)]

    def draw(self, trial_id: int) -> dict[str, Any]:
        return self.space.sample(Random(f"{self.seed} {trial_id}"))

    def trial_created(self, trial_id: int) -> list[Operation]:
        del trial_id
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        del trial_id, metric, length
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        if trial_id not in self.open:
            return []
        self.open.discard(trial_id)
        return self.create()

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        del reason
        return self.trial_exited(trial_id)

    def progress(self) -> float:
        return 0.0


class OptunaSearcher(Endless):
    """A study of the real Optuna, with values told and pruning asked after every epoch.

    Args:
        space: What is searched.
        seed: Of the sampler.
        sampler: ``tpe`` (with Optuna's own settings) or ``cmaes``.
        pruner: ``none``, ``hyperband`` or ``halving``.
    """

    def __init__(self, space: Mapping[str, Any], seed: int, sampler: str, pruner: str) -> None:
        super().__init__(space, seed)
        import optuna

        _speed_up(optuna)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")
        made: Any = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed),
            "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=seed),
        }[sampler]()
        prune: Any = {
            "none": optuna.pruners.NopPruner,
            "hyperband": lambda: optuna.pruners.HyperbandPruner(
                min_resource=1, max_resource=EPOCHS, reduction_factor=3
            ),
            "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(
                min_resource=1, reduction_factor=3
            ),
        }[pruner]()
        # Hyperband sorts trials into its brackets by this name; Optuna's own is another every time.
        self.study = optuna.create_study(sampler=made, pruner=prune, study_name=f"seed {seed}")
        self.state = optuna.trial.TrialState
        self.asked: dict[int, Any] = {}
        self.last: dict[int, float] = {}
        self.prunes = pruner != "none"

    def draw(self, trial_id: int) -> dict[str, Any]:
        trial = self.study.ask()
        self.asked[trial_id] = trial
        point: list[float | None] = []
        for d in self.space.dimensions:
            exists = all(point[i] is not None and int(point[i] or 0) in c for i, c in d.when)
            if not exists:
                point.append(None)
            elif d.kind == "categorical":
                point.append(float(trial.suggest_categorical(d.name, list(range(d.size)))))
            elif d.kind == "int":
                point.append((trial.suggest_int(d.name, 0, d.size - 1) + 0.5) / d.size)
            else:
                point.append(trial.suggest_float(d.name, 0.0, 1.0))
        return self.space.hparams(self.space.snap(point))

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        if trial_id not in self.open:
            return []
        trial = self.asked[trial_id]
        if not math.isfinite(metric):
            self._tell(trial_id, None)
            return [Stop(trial_id)]
        self.last[trial_id] = metric
        if self.prunes:
            trial.report(metric, int(length))
            if length < EPOCHS and trial.should_prune():
                self._tell(trial_id, metric, pruned=True)
                return [Stop(trial_id)]
        return []

    def _tell(self, trial_id: int, value: float | None, *, pruned: bool = False) -> None:
        trial = self.asked.pop(trial_id)
        if value is None:
            self.study.tell(trial, state=self.state.FAIL)
        elif pruned:
            self.study.tell(trial, state=self.state.PRUNED)
        else:
            self.study.tell(trial, value)

    def trial_exited(self, trial_id: int) -> list[Operation]:
        if trial_id in self.asked:
            self._tell(trial_id, self.last[trial_id])
        return super().trial_exited(trial_id)


def _speed_up(optuna: Any) -> None:
    """Give Optuna's sampler SciPy's logarithm of the normal distribution: it takes half its time.

    Both are the same to a part in a trillion; Optuna's is Python, a number at a time.
    """
    from scipy.special import log_ndtr

    normal = optuna.samplers._tpe._truncnorm
    if hasattr(normal, "_log_ndtr"):
        normal._log_ndtr = log_ndtr


class Pasha(Endless):
    """ASHA that promotes, whose ladder grows only while the two highest rungs disagree.

    References:
        Bohdal et al., PASHA: Efficient HPO and NAS with Progressive Resource Allocation, ICLR
        2023, algorithm 1; soft ranking with epsilon from the noise of the curves.
    """

    LEVELS = (1, 3, 9, 27)

    def __init__(self, space: Mapping[str, Any], seed: int) -> None:
        super().__init__(space, seed)
        self.rungs: list[dict[int, float]] = [{} for _ in self.LEVELS]
        self.promoted: list[set[int]] = [set() for _ in self.LEVELS]
        self.top = 1
        self.due: dict[int, int] = {}

    def create(self) -> list[Operation]:
        self.due[self.created + 1] = 0
        return [*super().create(), Continue(self.created, self.LEVELS[0])]

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        rung = self.due.get(trial_id)
        if rung is None or (length < self.LEVELS[rung] and math.isfinite(metric)):
            return []
        del self.due[trial_id]
        value = metric if math.isfinite(metric) else math.inf
        self.rungs[rung][trial_id] = value
        if rung == self.top and rung < len(self.LEVELS) - 1 and not self._stable():
            self.top += 1
        stop: list[Operation] = []
        if rung == len(self.LEVELS) - 1 or value == math.inf:
            self.open.discard(trial_id)
            stop = [Stop(trial_id)]
        return [*stop, *self._next()]

    def _next(self) -> list[Operation]:
        for rung in range(self.top - 1, -1, -1):
            ranked = sorted(self.rungs[rung], key=lambda i: (self.rungs[rung][i], i))
            for trial_id in ranked[: len(ranked) // 3]:
                good = math.isfinite(self.rungs[rung][trial_id])
                if good and trial_id not in self.promoted[rung]:
                    self.promoted[rung].add(trial_id)
                    self.due[trial_id] = rung + 1
                    return [Continue(trial_id, self.LEVELS[rung + 1])]
        return self.create()

    def _stable(self) -> bool:
        """Whether the two highest rungs rank alike, but for pairs that are too close to tell."""
        upper, lower = self.rungs[self.top], self.rungs[self.top - 1]
        known = [i for i in upper if math.isfinite(upper[i])]
        values = sorted(upper[i] for i in known)
        gaps = sorted(b - a for a, b in itertools.pairwise(values))
        close = gaps[int(0.9 * (len(gaps) - 1))] if gaps else 0.0
        return all(
            (upper[i] < upper[j]) == (lower[i] < lower[j]) or abs(lower[i] - lower[j]) <= close
            for i in known
            for j in known
            if i < j
        )

    def trial_exited(self, trial_id: int) -> list[Operation]:
        self.open.discard(trial_id)
        return []
