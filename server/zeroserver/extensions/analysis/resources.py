"""Analysis of an experiment's trials."""

from zeroserver.api.resources.metrics import MetricName
from zeroserver.api.rows import Num, Resource, Time

__all__ = [
    "ExperimentColumns",
    "HparamShare",
    "Importance",
    "Improvement",
    "SearchProgress",
    "TrialColumns",
]


class TrialColumns(Resource, frozen=True):
    """All trials of an experiment, the oldest first: a list for each column."""

    columns: dict[str, list[float | str | bool | None]]
    """`id`, `state` and other fields of a trial by their names, and each hyperparameter as
    `hparams.` and its dotted name; null where a trial has none. Numbers that are not finite are
    text, as everywhere."""


class ExperimentColumns(Resource, frozen=True):
    """Metrics of every experiment's best trial, the oldest experiment first."""

    names: list[MetricName]
    """All metrics that were ever reported."""
    columns: dict[str, list[Num | None]]
    """`id` of the experiment, and the metrics that were asked for; null where the trial has none.
    While no trial is the best one, the first one counts."""


class Improvement(Resource, frozen=True):
    """A validation that was better than all before it."""

    time: Time
    """When the searcher was told of it."""
    trial_id: int
    """Of which trial."""
    length: float | None
    """How far that trial was, in the searcher's unit."""
    value: Num
    """The searcher's metric."""


class SearchProgress(Resource, frozen=True):
    """The best value so far over time."""

    improvements: list[Improvement]
    validations: int
    """How many validations there were, those that were not better too."""


class HparamShare(Resource, frozen=True):
    """How much one hyperparameter matters."""

    name: str
    """Its dotted name."""
    importance: float
    """Its part in the differences between trials, alone and together with others: 0 for one that
    does not matter, 1 for one that decides alone."""
    spread: float
    """Standard error of that, over the trees."""


class Importance(Resource, frozen=True):
    """Which hyperparameters matter for the searcher's metric."""

    method: str
    """How it was found out, and what that cannot tell."""
    trials: int
    """How many trials with a result it stands on."""
    explained: float | None
    """How much of the differences between trials the hyperparameters predict for trials that were
    not learned from: 1 is all, 0 or below nothing. Below 0.2 the shares mean little."""
    shares: list[HparamShare]
    """The one that matters most comes first."""
    problem: str | None
    """Why there are none; else null."""
