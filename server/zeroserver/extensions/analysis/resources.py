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
    """All trials of an experiment, oldest first: a list per column."""

    columns: dict[str, list[float | str | bool | None]]
    """Fields of a trial such as `id` and `state`, and hyperparameters as `hparams.NAME` with their
    dotted names. Missing values are null; infinities and NaN are text."""


class ExperimentColumns(Resource, frozen=True):
    """Metrics of every experiment's best trial, oldest experiment first."""

    names: list[MetricName]
    """All metrics that were ever reported."""
    columns: dict[str, list[Num | None]]
    """`id` of the experiment and the requested metrics of its best trial, or of its first trial if
    none is best. Missing values are null."""


class Improvement(Resource, frozen=True):
    """Validation that is better than all previous ones."""

    time: Time
    """Time when the searcher received it."""
    trial_id: int
    """Trial of the validation."""
    length: float | None
    """Length of the trial at that time, in the searcher's unit."""
    value: Num
    """The searcher's metric."""


class SearchProgress(Resource, frozen=True):
    """Best value so far over time."""

    improvements: list[Improvement]
    validations: int
    """Number of all validations."""


class HparamShare(Resource, frozen=True):
    """Importance of one hyperparameter."""

    name: str
    """Dotted name."""
    importance: float
    """Its share of the variance between trials, alone and together with others: 0 if it has no
    effect, 1 if it determines the result."""
    spread: float
    """Standard error of the importance, over the trees."""


class Importance(Resource, frozen=True):
    """Importance of the hyperparameters for the searcher's metric."""

    method: str
    """Description of the method and its limits."""
    trials: int
    """Number of trials with a result."""
    explained: float | None
    """Out-of-bag R2: share of the variance that the hyperparameters predict for unseen trials.
    Below 0.2 the shares mean little."""
    shares: list[HparamShare]
    """Importance of the hyperparameters, largest first."""
    problem: str | None
    """Why there is no result; else null."""
