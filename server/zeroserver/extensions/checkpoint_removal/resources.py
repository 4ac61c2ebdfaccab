"""Resources of removed checkpoints."""

from zeroserver.api.rows import Resource

__all__ = ["Removal", "RemovedCheckpoint"]


class RemovedCheckpoint(Resource, frozen=True):
    """What goes of a checkpoint."""

    uuid: str
    """Its name."""
    trial_id: int
    """Whose state it is."""
    steps_completed: int
    """Batches that the trial had trained."""
    whole: bool
    """Whether all of it goes."""
    files: list[str]
    """The files that go."""
    size_bytes: int
    """Of those files."""


class Removal(Resource, frozen=True):
    """Removed checkpoints, or those that a dry run would remove."""

    dry_run: bool
    """Nothing was done."""
    checkpoints: list[RemovedCheckpoint]
    """What goes of each."""
    size_bytes: int
    """Of all that goes."""
