"""Trials and their runs."""

from typing import Any

from zeroserver.api.rows import Num, Resource, Share, Time
from zeroserver.states import RunState, TrialState

__all__ = ["Run", "RunPage", "Trial", "TrialAnswer", "TrialPage"]


class Trial(Resource, frozen=True):
    """Training with one choice of hyperparameters."""

    id: int
    """Id, from 1, unique over all experiments."""
    experiment_id: int
    """Its experiment."""
    state: TrialState
    """State. `PAUSED`: it released its slots and waits."""
    hparams: dict[str, Any]
    """Hyperparameters chosen by the searcher."""
    seed: int
    """Seed chosen by the searcher."""
    restarts: int
    """Number of restarts after failures."""
    steps_completed: int
    """Number of trained batches."""
    progress: Share
    """0 to 1."""
    activity: str | None
    """Activity of its run: `starting`, `training`, `validating`, `checkpointing`."""
    waiting_reason: str | None
    """Why it has no slots while it is `QUEUED`; an error of its script at a rung while it is
    `PAUSED`; else null."""
    labels: list[str]
    """Names of log policies that matched its log."""
    archived: bool
    """Whether it is archived; lists can exclude it."""
    best_validation: Num | None
    """Best value of the searcher's metric."""
    best_steps: int | None
    """Batch of the best validation."""
    latest_validation: Num | None
    """Latest value of the searcher's metric."""
    slot_seconds: float
    """Cost so far: slots times seconds for which its runs held them."""
    latest_checkpoint: str | None
    """Uuid of the latest checkpoint."""
    best_checkpoint: str | None
    """Uuid of the best checkpoint."""
    source_trial_id: int | None
    """Trial from whose weights it starts, if chosen by the searcher."""
    source_checkpoint: str | None
    """Uuid of the checkpoint from which it starts; empty if its source trial has none."""
    run_id: int | None
    """Current run."""
    created_at: Time
    """Time when the searcher created it."""
    started_at: Time | None
    """Start time of its first run."""
    ended_at: Time | None
    """End time."""
    error: str | None
    """One-line message for the user."""
    result_problem: str | None
    """Why it ended without a result, even if `COMPLETED` (no validation, or only NaN); else null.
    """


class TrialAnswer(Resource, frozen=True):
    """Response with one trial."""

    trial: Trial


class TrialPage(Resource, frozen=True):
    """Page of trials."""

    trials: list[Trial]
    next_after: str | None
    total: int
    """Number of trials on all pages."""


class Run(Resource, frozen=True):
    """One continuous execution of a trial."""

    id: int
    """Id, from 1, unique over all trials."""
    trial_id: int
    """Its trial."""
    state: RunState
    """State."""
    agents: list[str]
    """Names of the agents whose slots it holds or held, chief first, without deleted agents."""
    created_at: Time
    """Time when it got its slots."""
    started_at: Time | None
    """Time when its ranks started."""
    ended_at: Time | None
    """Time when it released its slots."""
    exit_code: int | None
    """Exit code of its launcher; null while it runs or if unknown."""
    reason: str | None
    """Why it ended, if it did not complete."""
    failed: bool
    """Whether it ended with an error; false while it runs or if it was preempted."""


class RunPage(Resource, frozen=True):
    """All runs of a trial, oldest first."""

    runs: list[Run]
    next_after: None = None
