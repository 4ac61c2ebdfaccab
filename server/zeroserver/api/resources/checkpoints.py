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
    """A saved state of a trial."""

    uuid: str
    """Its name."""
    trial_id: int
    """Whose state it is."""
    experiment_id: int
    """Whose trial that is."""
    run_id: int | None
    """The run that saved it."""
    steps_completed: int
    """Batches that the trial had trained."""
    state: Literal["COMPLETED", "PARTIAL", "DELETED", "ERROR"]
    """Whether its files are there; `PARTIAL`: some of them were removed."""
    size_bytes: int
    """Of all its files."""
    resources: dict[str, int]
    """File to bytes."""
    metadata: dict[str, Any]
    """What was saved with it."""
    metrics: dict[str, Num] | None
    """Validation metrics at that step."""
    created_at: Time | None
    """When it was complete."""
    path: str
    """Its directory, or its URL in an object store."""


class CheckpointAnswer(Resource, frozen=True):
    """One checkpoint."""

    checkpoint: Checkpoint


class BestCheckpoint(Resource, frozen=True):
    """The checkpoint whose own validation is the best."""

    checkpoint: Checkpoint | None
    """Null when no checkpoint has a validation at its batch."""
    validation: Num | None
    """The searcher's metric at that batch."""
    note: str | None
    """Set when the trial has ended and its best validation has no checkpoint: what saves one."""


class BestCheckpointAnswer(Resource, frozen=True):
    """The best checkpoint of an experiment or a trial."""

    best_checkpoint: BestCheckpoint


class CheckpointPage(Resource, frozen=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_after: str | None
    count: int
    """How many are there, on all pages; deleted ones are not counted."""
    size_bytes: int
    """Of those."""
