"""``optuna``: trials that a sampler of the library Optuna proposes.

The study is in memory. A server that restarts makes it again and replays the events of the search:
the sampler has a seed, so it proposes the same trials. A proposal may take a second, so all uses of
the study are deferred, in the order of the events.
"""

import inspect
import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from threadpoolctl import ThreadpoolController

from zerolab.schema.section import PositiveInt, suggest
from zerolab.schema.space import MAX_TRIALS, Space
from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Deferred, Operation, Stop
from zerolab.searcher.predefined import FixedTrialsSearcher
from zerolab.searcher.section import SearcherConfig

__all__ = ["OptunaConfig", "OptunaSearcher"]

_NEEDS_OPTUNA = (
    "searcher.name: must not be 'optuna' without the package optuna; "
    "run `pip install 'zerolab[optuna]'` where the configuration is checked and on the server"
)
_NOT_HERE = {
    "BruteForceSampler": "use searcher.name: grid",
    "GridSampler": "use searcher.name: grid",
    "PartialFixedSampler": "write constants in hyperparameters",
    "PatientPruner": "use its wrapped pruner",
}
"""Classes of Optuna that need objects or spaces that a file cannot give, and what to use."""
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}
"""Annotations of arguments that a file can give, and their types."""


class OptunaConfig(SearcherConfig):
    """Trials that a sampler of Optuna proposes."""

    name: Literal["optuna"]
    """``max_trials`` trials that a sampler of the library Optuna proposes; needs the extra
    ``optuna``."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """Number of trials, without those that are replaced because of ``InvalidHP``."""

    sampler: str = "TPESampler"
    """Name of a class of ``optuna.samplers``."""

    sampler_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the sampler; ``seed`` is the experiment's seed unless it is set."""

    pruner: str = "NopPruner"
    """Name of a class of ``optuna.pruners``, which may stop a trial after each validation."""

    pruner_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the pruner."""

    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_trials"})
    has_slow_replay: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report a missing library, unknown classes and arguments that they do not accept."""
        yield from super().problems(space)
        if not self.max_concurrent_trials:
            yield (
                "searcher.max_concurrent_trials: must be at least 1 for the optuna searcher, "
                "got 0; trials that all start at once cannot learn from each other"
            )
        try:
            import optuna
        except ImportError:
            yield _NEEDS_OPTUNA
            return
        with _quiet():
            yield from _class_problems(
                optuna.samplers, optuna.samplers.BaseSampler, "sampler", self.sampler,
                self.sampler_args,
            )  # fmt: skip
            yield from _class_problems(
                optuna.pruners, optuna.pruners.BasePruner, "pruner", self.pruner, self.pruner_args
            )

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the number of trials and the sampler."""
        del space
        return f"{self.max_trials} trials proposed by Optuna's {self.sampler}"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Return all trials at full length; nothing with a pruner."""
        del space
        return {self.length: self.max_trials} if self.pruner == "NopPruner" else {}

    def most_length(self, space: Mapping[str, Any]) -> int | None:
        """Return the length of all trials at full length."""
        del space
        return self.max_trials * self.length if self.unit else None

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Add trials."""
        del lost  # trials that have ended do not continue
        assert isinstance(searcher, OptunaSearcher)
        return searcher.grow(self.max_trials)

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make the searcher; Optuna is imported here."""
        return OptunaSearcher(self, Space(space), seed)


class OptunaSearcher(FixedTrialsSearcher):
    """Asks a study for each trial, and tells it the last value of the metric.

    A trial that failed, was stopped by a user or has no finite value is a failed one there.

    Args:
        config: The ``searcher`` block, without problems.
        space: Search space.
        seed: Seed of the experiment.
    """

    def __init__(self, config: OptunaConfig, space: Space, seed: int) -> None:
        import optuna

        super().__init__(
            self._ask, config.max_trials, config.max_concurrent_trials, seed, config.length,
            replaces_invalid=True,
        )  # fmt: skip
        self._space = space
        self._states = optuna.trial.TrialState
        self._jobs: deque[Callable[[], list[Operation]]] = deque()  # uses of the study
        self._asked: dict[int, optuna.Trial] = {}  # trials of the study without a result
        self._pruned: set[int] = set()
        self._last: dict[int, float] = {}  # trial id -> last value of the metric
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # else a line for each trial
        with _quiet():
            sampler = _make(optuna.samplers, config.sampler, {"seed": seed} | config.sampler_args)
            self._study = optuna.create_study(
                study_name=f"seed {seed}",  # HyperbandPruner assigns brackets by this name
                sampler=sampler,
                pruner=_make(optuna.pruners, config.pruner, config.pruner_args),
                direction="minimize" if config.smaller_is_better else "maximize",
            )
        self._prunes = config.pruner != "NopPruner"
        self._threads = ThreadpoolController()  # a search decides on one core

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Record the value; ask the pruner whether the trial stops."""
        super().validation_completed(trial_id, metric, length)
        if not self._is_open(trial_id):
            return []
        self._last[trial_id] = metric
        if not self._prunes or not math.isfinite(metric):
            return []
        return [self._defer(partial(self._report, trial_id, metric, length))]

    def grow(self, total: int) -> list[Operation]:
        """Continue with more trials.

        Args:
            total: New number of trials.

        Returns:
            Operations that create them.
        """
        self._total, self._is_finished = total, False
        return self._fill()

    def _defer(self, job: Callable[[], list[Operation]]) -> Deferred:
        """Defer a use of the study; each deferred operation executes the oldest one."""
        self._jobs.append(job)
        return Deferred(self._next_job)

    def _next_job(self) -> list[Operation]:
        return self._jobs.popleft()()

    def _create(self, trial_id: int) -> Operation:
        create = super()._create
        return self._defer(lambda: [create(trial_id)])

    def _ask(self, trial_id: int, rng: Random) -> dict[str, Any]:
        del rng  # the sampler has the seed
        point: list[float | None] = []
        with _quiet(), self._threads.limit(limits=1):
            trial = self._asked[trial_id] = self._study.ask()
            for dimension in self._space.dimensions:
                name = dimension.name
                if not all(point[index] in allowed for index, allowed in dimension.when):
                    point.append(None)
                elif dimension.kind == "categorical":
                    # Indices: Optuna accepts no lists and mappings as values.
                    point.append(float(trial.suggest_categorical(name, range(dimension.size))))
                elif dimension.kind == "int":
                    index = trial.suggest_int(name, 0, dimension.size - 1)
                    point.append((index + 0.5) / dimension.size)
                else:
                    point.append(trial.suggest_float(name, 0.0, 1.0))
        return self._space.hparams(self._space.snap(point))

    def _report(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        if trial_id in self._pruned:
            return []
        trial = self._asked[trial_id]
        with _quiet():
            trial.report(metric, int(length))
            if not trial.should_prune() or length >= self._length > 0:
                return []
        self._pruned.add(trial_id)
        return [Stop(trial_id)]

    def _close(self, trial_id: int, reason: str) -> list[Operation]:
        if not self._is_open(trial_id):
            return []
        value = self._last.pop(trial_id, math.nan)
        early = reason in {member.value for member in ExitReason}
        result = self._defer(partial(self._tell, trial_id, None if early else value))
        return [result, *super()._close(trial_id, reason)]

    def _tell(self, trial_id: int, value: float | None) -> list[Operation]:
        trial = self._asked.pop(trial_id)
        with _quiet():
            if value is None or not math.isfinite(value):
                self._study.tell(trial, state=self._states.FAIL)
            elif trial_id in self._pruned:
                self._study.tell(trial, state=self._states.PRUNED)
            else:
                self._study.tell(trial, value)
        return []


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about experimental arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _make(module: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    cls = getattr(module, name)
    accepted = _parameters(cls)
    return cls(**{key: value for key, value in arguments.items() if key in accepted})


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the named arguments of a class."""
    parameters = list(inspect.signature(cls).parameters.values())
    return {
        item.name: item
        for item in parameters
        if item.kind not in {item.VAR_POSITIONAL, item.VAR_KEYWORD}
    }


def _class_problems(
    module: Any, base: type, field: str, name: str, arguments: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a message for an unknown class and for each argument that it does not accept."""
    names = [
        candidate
        for candidate in module.__all__
        if inspect.isclass(cls := getattr(module, candidate))
        and issubclass(cls, base)
        and not inspect.isabstract(cls)
        and candidate not in _NOT_HERE
    ]
    if name not in names:
        advice = f"; {_NOT_HERE[name]}" if name in _NOT_HERE else suggest(name, names)
        yield f"searcher.{field}: must be one of {', '.join(names)}, got {name!r}{advice}"
        return
    parameters = _parameters(getattr(module, name))
    problems = [
        f"searcher.{field}_args.{key}: {problem}"
        for key, value in arguments.items()
        if (problem := _argument_problem(name, parameters, key, value)) is not None
    ]
    yield from problems
    if not problems:
        try:
            _make(module, name, arguments)
        except (TypeError, ValueError, ImportError) as error:
            text = " ".join(str(error).split())
            yield f"searcher.{field}_args: must be accepted by {name}, got {arguments}: {text}"


def _argument_problem(
    name: str, parameters: Mapping[str, inspect.Parameter], key: str, value: Any
) -> str | None:
    if key not in parameters:
        return f"unknown argument of {name}{suggest(key, parameters)}"
    annotation = parameters[key].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    kinds = [kind.strip() for kind in text.split("|")]
    if value is None and "None" in kinds:
        return None
    types: tuple[type, ...] = ()
    for kind in kinds:
        types += (dict,) if kind.startswith("dict[") else _KINDS.get(kind, ())
    if not types:
        return f"must be left out, since a file cannot give {text}"
    if (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
        return f"must be {' or '.join(kinds)}, got {value!r}"
    return None
