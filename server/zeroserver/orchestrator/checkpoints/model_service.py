"""Model registry: models by name, with checkpoints as their versions.

A checkpoint that is a version of a model is kept until the version is removed, regardless of the
retention policy of its experiment.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, Select, func, select

from zerolab.errors import ConflictError
from zeroserver.orchestrator.service import Service
from zeroserver.store.schema import checkpoints, model_versions, models

__all__ = ["ModelService", "registered", "versions_of"]


class ModelService(Service):
    """Protects checkpoints that are versions of models; an extension registers them."""

    def refuse_while_registered(self, thing: str, whose: ColumnElement[bool]) -> None:
        """Refuse to delete an experiment or trial with a registered checkpoint.

        Args:
            thing: Experiment or trial to delete, as in "trial 3".
            whose: Condition on the checkpoints that would be deleted with it.

        Raises:
            ConflictError: If one of them is registered; the error names the model version.
        """
        query = (
            select(models.c.name, func.min(model_versions.c.version).label("version"))
            .join(model_versions, models.c.id == model_versions.c.model_id)
            .join(checkpoints, checkpoints.c.uuid == model_versions.c.checkpoint)
            .where(whose)
            .group_by(models.c.name)
            .order_by(models.c.name)
            .limit(1)
        )
        row = self.work.connection.execute(query).first()
        if row is not None:
            msg = (
                f"{thing}: a checkpoint of it is version {row.version} of model "
                f"{row.name}; `zerolab model delete-version {row.name} {row.version}` first"
            )
            raise ConflictError(msg)


def registered() -> Select[tuple[str]]:
    """Select the checkpoints that are versions of models and must not be deleted."""
    return select(model_versions.c.checkpoint)


def versions_of(connection: Connection, uuids: Sequence[str]) -> Mapping[str, tuple[str, int]]:
    """Return the model name and version of each registered checkpoint."""
    query = (
        select(model_versions.c.checkpoint, models.c.name, model_versions.c.version)
        .join(models, models.c.id == model_versions.c.model_id)
        .where(model_versions.c.checkpoint.in_(uuids))
        .order_by(model_versions.c.model_id, model_versions.c.version)
    )
    return {row.checkpoint: (row.name, row.version) for row in connection.execute(query)}
