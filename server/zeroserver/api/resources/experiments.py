"""Experiments."""

from typing import Any

from zeroserver.api.rows import Name, Num, Resource, Share, Time
from zeroserver.states import ExperimentState

__all__ = ["Experiment", "ExperimentAnswer", "ExperimentPage"]


class Experiment(Resource, frozen=True):
    """One config file's run: a searcher and its trials."""

    id: int
    """Number, from 1."""
    name: str
    """Can be changed."""
    description: str
    """Can be changed."""
    labels: list[str]
    """Can be changed."""
    notes: str
    """Can be changed."""
    state: ExperimentState
    """Where it stands; `COMPLETED`, `CANCELED` and `ERROR` are for good."""
    config: dict[str, Any]
    """The whole configuration, defaults filled in, with the seed that was chosen."""
    progress: Share
    """0 to 1."""
    created_at: Time
    """When it was submitted."""
    started_at: Time | None
    """When its first run began."""
    ended_at: Time | None
    """When it ended."""
    archived: bool
    """Set aside."""
    test_mode: bool
    """Submitted with `test`."""
    forked_from: int | None
    """Id of the original."""
    source_checkpoint: str | None
    """Uuid of the checkpoint whose weights its trials begin with."""
    searcher_name: str
    """How trials are chosen."""
    metric: Name | None
    """By which validation metric they are compared; null for a single trial that names none."""
    smaller_is_better: bool
    """Which way they are compared."""
    num_trials: int
    """How many there are by now."""
    failed_trials: int
    """How many of them ended with an error."""
    canceled_trials: int
    """How many of them were canceled."""
    best_trial_id: int | None
    """The best trial by now."""
    best_validation: Num | None
    """Its metric."""
    waiting_reason: str | None
    """Why none of its trials runs, while it is `ACTIVE`; else null."""
    error: str | None
    """One line, when the state is `ERROR` or no trial has a result; the logs have the traceback."""
    result_problem: str | None
    """Why it ended without a result, also when it is `COMPLETED`: every trial failed, or none
    reported a number for the metric; else null."""
    unread_hparams: list[str]
    """Searched hyperparameters that no trial has read; empty while that is not known."""


class ExperimentAnswer(Resource, frozen=True):
    """One experiment."""

    experiment: Experiment
    warnings: list[str]
    """What a submission came upon that is no reason to refuse it, a line each."""


class ExperimentPage(Resource, frozen=True):
    """A page of experiments."""

    experiments: list[Experiment]
    next_after: str | None
