"""Changes of projects."""

from typing import Any

from sqlalchemy import select, update

from zerolab.contract.names import DEFAULT_PROJECT
from zerolab.errors import ConflictError, NotFoundError
from zeroserver.orchestrator.service import Service
from zeroserver.store.project_directory import FIRST_PROJECT
from zeroserver.store.rows import ProjectRow, read_row
from zeroserver.store.schema import projects

__all__ = ["ProjectService"]


class ProjectService(Service):
    """Creates and changes projects; the directory in memory follows the commit."""

    def create(self, name: str, description: str, owner_id: int) -> None:
        """Create a project.

        Raises:
            ConflictError: If one has the name already.
        """
        if self._read(name) is not None:
            raise ConflictError(f"project {name}: exists already; `zerolab project list`")
        row = {
            "name": name,
            "description": description,
            "owner_id": owner_id,
            "created_at": self.work.clock(),
        }
        self.work.connection.execute(projects.insert().values(row))
        self._publish(name)

    def ensure(self, name: str, owner_id: int) -> None:
        """Create a project unless it exists."""
        if self._read(name) is None:
            self.create(name, "", owner_id)

    def change(self, name: str, values: dict[str, Any]) -> None:
        """Change the description or notes of a project, or archive or unarchive it.

        Raises:
            NotFoundError: If there is no such project.
            ConflictError: If the project ``default`` is to be archived.
        """
        project = self._find(name)
        if project.id == FIRST_PROJECT.id and values.get("archived"):
            msg = (
                f"project {DEFAULT_PROJECT}: cannot be archived, since experiments that name no "
                "project belong to it"
            )
            raise ConflictError(msg)
        if values:
            query = update(projects).where(projects.c.id == project.id).values(values)
            self.work.connection.execute(query)
            self._publish(name)

    def _find(self, name: str) -> ProjectRow:
        project = self._read(name)
        if project is None:
            raise NotFoundError(f"there is no project {name}; `zerolab project list` lists them")
        return project

    def _read(self, name: str) -> ProjectRow | None:
        query = select(projects).where(projects.c.name == name)
        return read_row(self.work.connection, ProjectRow, query)

    def _publish(self, name: str) -> None:
        project = self._find(name)
        self.work.then.append(lambda: self.work.orchestrator.projects.put(project))
