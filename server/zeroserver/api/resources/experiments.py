"""Experiments."""

from typing import Any

from zeroserver.api.rows import Name, Num, Resource, Share, Time
from zeroserver.states import ExperimentState

__all__ = ["Experiment", "ExperimentAnswer", "ExperimentPage"]


class Experiment(Resource, frozen=True):
    """Searcher and trials of one experiment file."""

    id: int
    """Id, from 1."""
    name: str
    """Can be changed."""
    description: str
    """Can be changed."""
    labels: list[str]
    """Can be changed."""
    notes: str
    """Can be changed."""
    owner: str | None
    """User to whom it belongs; null while the installation has a single user."""
    project: str | None
    """Its project; null if the installation has only one project."""
    state: ExperimentState
    """State; `COMPLETED`, `CANCELED` and `ERROR` are final."""
    config: dict[str, Any]
    """Complete configuration with defaults and the chosen seed."""
    progress: Share
    """0 to 1."""
    created_at: Time
    """Time of submission."""
    started_at: Time | None
    """Start time of its first run."""
    ended_at: Time | None
    """End time."""
    archived: bool
    """Whether it is archived."""
    test_mode: bool
    """Whether it was submitted with `test`."""
    forked_from: int | None
    """Id of the original experiment of a fork."""
    source_checkpoint: str | None
    """Uuid of the checkpoint from which its trials start."""
    searcher_name: str
    """Name of the searcher."""
    metric: Name | None
    """Validation metric that compares trials; null for a single trial without one."""
    smaller_is_better: bool
    """Whether smaller values of the metric are better."""
    num_trials: int
    """Number of trials created so far."""
    failed_trials: int
    """Number of trials that ended with an error."""
    canceled_trials: int
    """Number of canceled trials."""
    best_trial_id: int | None
    """Best trial so far."""
    best_validation: Num | None
    """Metric of the best trial."""
    waiting_reason: str | None
    """Why none of its trials runs while it is `ACTIVE`; else null."""
    error: str | None
    """One-line error if it failed or no trial has a result; the logs have the traceback."""
    result_problem: str | None
    """Why it ended without a result, even if `COMPLETED`: all trials failed, or none reported a
    number for the metric; else null."""
    metrics_expired_at: Time | None
    """Time at which most values of its training and system metrics were removed
    (`retention_policy.metric_retention_days`); null if all are stored."""
    unread_hparams: list[str]
    """Searched hyperparameters that no trial has read; empty while unknown."""


class ExperimentAnswer(Resource, frozen=True):
    """Response with one experiment."""

    experiment: Experiment
    warnings: list[str]
    """Warnings of a submission, one line each."""


class ExperimentPage(Resource, frozen=True):
    """Page of experiments."""

    experiments: list[Experiment]
    next_after: str | None
