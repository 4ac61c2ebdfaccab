"""Changes of the model registry."""

from collections.abc import Iterable

from sqlalchemy import delete, select

from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zeroserver.orchestrator.service import Service
from zeroserver.store.project_directory import open_project
from zeroserver.store.schema import checkpoints, experiments, model_aliases, model_versions, models
from zeroserver.store.short_uuids import full_uuid

__all__ = ["ModelRegistry"]


class ModelRegistry(Service):
    """Registers checkpoints as versions of models, and names versions by aliases."""

    def create(
        self, name: str, description: str, owner_id: int, project: str | None = None
    ) -> None:
        """Register a model.

        Raises:
            ConflictError: If one has the name already, or the project is archived.
            ConfigError: If there is no such project.
        """
        if self._number(name) is not None:
            msg = f"model {name}: exists already; `zerolab model register-version` adds a version"
            raise ConflictError(msg)
        row = {
            "name": name,
            "description": description,
            "created_at": self.work.clock(),
            "owner_id": owner_id,
            "project_id": open_project(
                self.work.connection, project, "model", hidden=self.work.hidden
            ),
        }
        self.work.connection.execute(models.insert().values(row))

    def register(self, name: str, uuid: str, notes: str) -> int:
        """Register a checkpoint as the next version of a model; return its number.

        A checkpoint that is already a version of this model keeps its number.

        Raises:
            NotFoundError: If there is no such model.
            ConfigError: If the checkpoint is not there, whole.
        """
        model_id = self._find(name)
        uuid = full_uuid(self.work.connection, uuid)
        complete = select(checkpoints.c.id).where(
            checkpoints.c.uuid == uuid, checkpoints.c.state == "COMPLETED"
        )
        if self.work.hidden:
            complete = complete.join(experiments, experiments.c.id == checkpoints.c.experiment_id)
            complete = complete.where(experiments.c.project_id.not_in(self.work.hidden))
        if self.work.connection.scalar(complete) is None:
            problem = (
                f"must be a complete checkpoint, got {uuid}; `zerolab checkpoint list` lists them"
            )
            raise ConfigError("model version", [f"checkpoint: {problem}"])
        columns = model_versions.c
        of_model = columns.model_id == model_id
        existing = self.work.connection.scalar(
            select(columns.version).where(of_model, columns.checkpoint == uuid)
        )
        if existing is not None:
            return int(existing)
        # Numbers are never reused, since users may still refer to a removed version.
        counter = models.update().where(models.c.id == model_id).returning(models.c.last_version)
        version = self.work.connection.scalar(
            counter.values(last_version=models.c.last_version + 1)
        )
        row = {
            "model_id": model_id,
            "version": version,
            "checkpoint": uuid,
            "notes": notes,
            "created_at": self.work.clock(),
        }
        self.work.connection.execute(model_versions.insert().values(row))
        return int(version or 0)

    def remove_version(self, name: str, version: int) -> None:
        """Remove a version; the retention policy applies to its checkpoint again.

        Raises:
            NotFoundError: If there is no such model, or version.
        """
        model_id = self._find_version(name, version)
        for table in (model_aliases, model_versions):
            self.work.connection.execute(
                delete(table).where(table.c.model_id == model_id, table.c.version == version)
            )

    def set_version_aliases(self, name: str, version: int, aliases: Iterable[str]) -> None:
        """Replace the aliases of a version; those of other versions move to it.

        Raises:
            NotFoundError: If there is no such model, or version.
        """
        model_id = self._find_version(name, version)
        columns = model_aliases.c
        of_version = (columns.model_id == model_id, columns.version == version)
        self.work.connection.execute(delete(model_aliases).where(*of_version))
        for alias in dict.fromkeys(aliases):
            self.set_alias(name, alias, version)

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Assign an alias to a version; it leaves its previous version.

        Raises:
            NotFoundError: If there is no such model, or version.
        """
        model_id = self._find_version(name, version)
        self._delete_alias(model_id, alias)
        row = {"model_id": model_id, "alias": alias, "version": version}
        self.work.connection.execute(model_aliases.insert().values(row))

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias; its version stays.

        Raises:
            NotFoundError: If there is no such model, or alias.
        """
        if not self._delete_alias(self._find(name), alias):
            raise NotFoundError(f"there is no alias {alias} of model {name}")

    def remove(self, name: str) -> None:
        """Remove a model, its versions and aliases from the registry.

        Raises:
            NotFoundError: If there is no such model.
        """
        model_id = self._find(name)
        for table in (model_aliases, model_versions):
            self.work.connection.execute(delete(table).where(table.c.model_id == model_id))
        self.work.connection.execute(delete(models).where(models.c.id == model_id))

    def _number(self, name: str) -> int | None:
        row: int | None = self.work.connection.scalar(
            select(models.c.id).where(models.c.name == name)
        )
        return row

    def _find(self, name: str) -> int:
        number = self._number(name)
        if number is None:
            raise NotFoundError(f"there is no model {name}; `zerolab model list` shows them")
        return number

    def _find_version(self, name: str, version: int) -> int:
        """Return the id of a model that has this version."""
        model_id = self._find(name)
        columns = model_versions.c
        of_version = (columns.model_id == model_id, columns.version == version)
        if self.work.connection.scalar(select(columns.version).where(*of_version)) is None:
            raise NotFoundError(f"there is no version {version} of model {name}")
        return model_id

    def _delete_alias(self, model_id: int, alias: str) -> bool:
        columns = model_aliases.c
        of_model = (columns.model_id == model_id, columns.alias == alias)
        return bool(self.work.connection.execute(delete(model_aliases).where(*of_model)).rowcount)
