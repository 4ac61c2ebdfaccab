"""Resources of removed checkpoints."""

from zeroserver.api.rows import Resource

__all__ = ["Removal", "RemovedCheckpoint"]


class RemovedCheckpoint(Resource, frozen=True):
    """Removed checkpoint, or removed files of one."""

    uuid: str
    """Unique name."""
    trial_id: int
    """Trial that saved it."""
    steps_completed: int
    """Number of batches that the trial had trained."""
    whole: bool
    """Whether all its files are removed."""
    files: list[str]
    """Removed files."""
    size_bytes: int
    """Size of the removed files."""


class Removal(Resource, frozen=True):
    """Removed checkpoints, or those that a dry run would remove."""

    dry_run: bool
    """Whether nothing was removed."""
    checkpoints: list[RemovedCheckpoint]
    """Removed checkpoints or files."""
    size_bytes: int
    """Size of all removed files."""
