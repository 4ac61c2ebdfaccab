"""Models of the registry, and their versions."""

from zeroserver.api.rows import Num, Resource, Time

__all__ = ["Model", "ModelAnswer", "ModelPage", "ModelVersion"]


class ModelVersion(Resource, frozen=True):
    """A checkpoint of the registry."""

    version: int
    """From 1; never given twice."""
    checkpoint: str
    """Its uuid."""
    experiment_id: int
    """Whose checkpoint it is."""
    trial_id: int
    """Of which trial."""
    steps_completed: int
    """Batches that the trial had trained."""
    size_bytes: int
    """Of all its files."""
    metrics: dict[str, Num] | None
    """Validation metrics at that step."""
    notes: str
    """What was said of it when it was registered."""
    created_at: Time | None
    """When that was."""


class Model(Resource, frozen=True):
    """A model of the registry."""

    name: str
    """Its name."""
    description: str
    """What it is for."""
    created_at: Time | None
    """When it was added."""
    versions: list[ModelVersion]
    """Its checkpoints, the oldest version first; they are kept until they are taken out."""


class ModelAnswer(Resource, frozen=True):
    """One model."""

    model: Model


class ModelPage(Resource, frozen=True):
    """All models, by their names."""

    models: list[Model]
    next_after: None = None
