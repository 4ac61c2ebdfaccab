"""Models of the registry and their versions."""

from zeroserver.api.rows import Num, Resource, Time

__all__ = ["Model", "ModelAnswer", "ModelPage", "ModelVersion"]


class ModelVersion(Resource, frozen=True):
    """Registered checkpoint."""

    version: int
    """Number, from 1; never reused."""
    checkpoint: str
    """Uuid of the checkpoint."""
    experiment_id: int
    """Experiment of the checkpoint."""
    trial_id: int
    """Trial of the checkpoint."""
    steps_completed: int
    """Number of batches that the trial had trained."""
    size_bytes: int
    """Size of all its files."""
    metrics: dict[str, Num] | None
    """Validation metrics at its step."""
    notes: str
    """Notes from its registration."""
    aliases: list[str]
    """Aliases of this version, sorted."""
    created_at: Time | None
    """Time of registration."""


class Model(Resource, frozen=True):
    """Model of the registry."""

    name: str
    """Name of the model."""
    description: str
    """Description."""
    owner: str | None
    """User who created it; null while the installation has a single user."""
    project: str | None
    """Its project; null if the installation has only one project."""
    created_at: Time | None
    """Time of creation."""
    versions: list[ModelVersion]
    """Versions, oldest first; their checkpoints are kept until removed from the registry."""


class ModelAnswer(Resource, frozen=True):
    """Response with one model."""

    model: Model


class ModelPage(Resource, frozen=True):
    """Response with all models, sorted by name."""

    models: list[Model]
    next_after: None = None
