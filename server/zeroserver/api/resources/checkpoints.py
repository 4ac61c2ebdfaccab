"""Checkpoints of trials."""

from typing import Any, Literal

from zeroserver.api.rows import Num, Resource, Time

__all__ = [
    "BestCheckpoint",
    "BestCheckpointAnswer",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
]


class Checkpoint(Resource, frozen=True):
    """Saved state of a trial."""

    uuid: str
    """Unique name."""
    trial_id: int
    """Trial that saved it."""
    experiment_id: int
    """Experiment of the trial."""
    run_id: int | None
    """Run that saved it."""
    steps_completed: int
    """Number of batches that the trial had trained."""
    state: Literal["COMPLETED", "PARTIAL", "DELETED", "ERROR"]
    """Whether its files exist; `PARTIAL`: some of them were removed."""
    size_bytes: int
    """Size of all its files."""
    resources: dict[str, int]
    """Size of each file in bytes."""
    metadata: dict[str, Any]
    """Metadata saved with it."""
    metrics: dict[str, Num] | None
    """Validation metrics at its step."""
    created_at: Time | None
    """Time of its completion."""
    path: str
    """Directory, or URL in an object store."""


class CheckpointAnswer(Resource, frozen=True):
    """Response with one checkpoint."""

    checkpoint: Checkpoint


class BestCheckpoint(Resource, frozen=True):
    """Checkpoint with the best validation at its step."""

    checkpoint: Checkpoint | None
    """The checkpoint; null if none has a validation at its step."""
    validation: Num | None
    """The searcher's metric at its step."""
    note: str | None
    """Hint on how to save one, if the trial has ended and its best validation has no checkpoint."""


class BestCheckpointAnswer(Resource, frozen=True):
    """Response with the best checkpoint of an experiment or trial."""

    best_checkpoint: BestCheckpoint


class CheckpointPage(Resource, frozen=True):
    """Page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_after: str | None
    count: int
    """Number of checkpoints on all pages, without deleted ones."""
    size_bytes: int
    """Size of all these checkpoints."""
