"""Trials and their runs."""

from typing import Any

from zeroserver.api.rows import Num, Resource, Share, Time
from zeroserver.states import RunState, TrialState

__all__ = ["Run", "RunPage", "Trial", "TrialAnswer", "TrialPage"]


class Trial(Resource, frozen=True):
    """One choice of hyperparameters."""

    id: int
    """Number, from 1, over all experiments."""
    experiment_id: int
    """Whose trial it is."""
    state: TrialState
    """Where it stands. `PAUSED`: it gave its slots back and waits."""
    hparams: dict[str, Any]
    """What the searcher chose."""
    seed: int
    """What the searcher chose."""
    restarts: int
    """How often it has failed and been started again."""
    steps_completed: int
    """Batches."""
    progress: Share
    """0 to 1."""
    activity: str | None
    """What its run is doing: `starting`, `training`, `validating`, `checkpointing`."""
    waiting_reason: str | None
    """Why it has no slots, while it is `QUEUED`; while it is `PAUSED`, what its script did wrong
    where its searcher compares trials; else null."""
    labels: list[str]
    """Names of the log policies that have matched its log."""
    archived: bool
    """Whether a user has put it away: lists can leave it out."""
    best_validation: Num | None
    """Best value of the searcher's metric."""
    best_steps: int | None
    """The batch of that validation."""
    latest_validation: Num | None
    """Latest value of the searcher's metric."""
    slot_seconds: float
    """What it has cost: slots times the seconds for which its runs have held them, until now."""
    latest_checkpoint: str | None
    """A uuid."""
    best_checkpoint: str | None
    """A uuid."""
    source_trial_id: int | None
    """The trial whose weights it begins with, where the searcher chose it."""
    source_checkpoint: str | None
    """Uuid of the checkpoint whose weights it begins with; empty when its source has none."""
    run_id: int | None
    """The run that holds slots for it now."""
    created_at: Time
    """When the searcher asked for it."""
    started_at: Time | None
    """When its first run began."""
    ended_at: Time | None
    """When it ended."""
    error: str | None
    """One line for the user."""
    result_problem: str | None
    """Why it ended without a result, also when it is `COMPLETED` (no validation, or never a
    number); else null."""


class TrialAnswer(Resource, frozen=True):
    """One trial."""

    trial: Trial


class TrialPage(Resource, frozen=True):
    """A page of trials."""

    trials: list[Trial]
    next_after: str | None
    total: int
    """How many there are on all pages."""


class Run(Resource, frozen=True):
    """One continuous execution of a trial."""

    id: int
    """Number, from 1, over all trials."""
    trial_id: int
    """Whose run it is."""
    state: RunState
    """Where it stands."""
    agents: list[str]
    """Names of the agents whose slots it holds or held, the first with the chief; those that were
    forgotten are left out."""
    created_at: Time
    """When it was given its slots."""
    started_at: Time | None
    """When its ranks were started."""
    ended_at: Time | None
    """When it gave its slots back."""
    exit_code: int | None
    """Of its launcher; null while it runs, and where nobody learned it."""
    reason: str | None
    """Why it ended, where it did not complete."""
    failed: bool
    """Whether it ended with an error. False while it runs, and where it gave its slots back."""


class RunPage(Resource, frozen=True):
    """All runs of a trial, the oldest first."""

    runs: list[Run]
    next_after: None = None
