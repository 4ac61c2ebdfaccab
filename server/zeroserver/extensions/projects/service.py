"""Changes of projects."""

from typing import Any

from sqlalchemy import delete, select, update

from zerolab.contract.names import DEFAULT_PROJECT
from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zeroserver.orchestrator.service import Service
from zeroserver.store.project_directory import FIRST_PROJECT
from zeroserver.store.rows import ProjectRow, read_row
from zeroserver.store.schema import project_members, projects

__all__ = ["ProjectService", "missing_project"]


def missing_project(name: str) -> NotFoundError:
    """Return the error of a project that does not exist, or is hidden from the caller."""
    return NotFoundError(f"there is no project {name}; `zerolab project list` lists them")


class ProjectService(Service):
    """Creates and changes projects; the directory in memory follows the commit."""

    def create(self, name: str, description: str, owner_id: int) -> None:
        """Create a project.

        Raises:
            ConflictError: If one has the name already.
        """
        if self._read(name) is not None:
            raise ConflictError(
                f"project {name}: exists already; `zerolab project list` shows them"
            )
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
        """Change the description or notes of a project, archive it, or restrict it.

        Raises:
            NotFoundError: If there is no such project.
            ConflictError: If the project ``default`` is to be archived or restricted.
        """
        project = self._find(name)
        if project.id == FIRST_PROJECT.id and values.get("archived"):
            msg = (
                f"project {DEFAULT_PROJECT}: cannot be archived, since experiments that name no "
                "project belong to it"
            )
            raise ConflictError(msg)
        if project.id == FIRST_PROJECT.id and values.get("restricted"):
            msg = (
                f"project {DEFAULT_PROJECT}: cannot be restricted, since experiments that name no "
                "project belong to it; move them to another project"
            )
            raise ConflictError(msg)
        if values:
            query = update(projects).where(projects.c.id == project.id).values(values)
            self.work.connection.execute(query)
            self._publish(name)

    def add_member(self, name: str, user: str) -> None:
        """Add a member; idempotent.

        Raises:
            NotFoundError: If there is no such project.
            ConfigError: If there is no such user.
        """
        project = self._find(name)
        known = self.work.orchestrator.users.find(user)
        if known is None:
            problem = f"user: must be the name of a user, got {user!r}"
            raise ConfigError("request", [f"{problem}; `zerolab user list` lists them"])
        self._change_members(project, known.id, add=True)

    def remove_member(self, name: str, user: str) -> None:
        """Remove a member.

        Raises:
            NotFoundError: If there is no such project, or the user is no member.
            ConflictError: If the project belongs to the user.
        """
        project = self._find(name)
        known = self.work.orchestrator.users.find(user)
        if known is not None and known.id == project.owner_id:
            raise ConflictError(f"project {name} belongs to {user}, who is always a member")
        members = self._members(project)
        if known is None or known.id not in members:
            msg = f"project {name} has no member {user}; `zerolab project members {name}`"
            raise NotFoundError(msg)
        self._change_members(project, known.id, add=False)

    def _members(self, project: ProjectRow) -> set[int]:
        columns = project_members.c
        query = select(columns.user_id).where(columns.project_id == project.id)
        return set(self.work.connection.scalars(query))

    def _change_members(self, project: ProjectRow, user_id: int, *, add: bool) -> None:
        columns, connection = project_members.c, self.work.connection
        is_member = (columns.project_id == project.id) & (columns.user_id == user_id)
        connection.execute(delete(project_members).where(is_member))
        if add:
            row = {"project_id": project.id, "user_id": user_id}
            connection.execute(project_members.insert().values(row))
        members = self._members(project)
        directory, users = self.work.orchestrator.projects, self.work.orchestrator.users
        self.work.then.append(lambda: directory.put_members(project.id, members))
        self.work.then.append(users.note_change)

    def _find(self, name: str) -> ProjectRow:
        project = self._read(name)
        if project is None:
            raise missing_project(name)
        return project

    def _read(self, name: str) -> ProjectRow | None:
        query = select(projects).where(projects.c.name == name)
        return read_row(self.work.connection, ProjectRow, query)

    def _publish(self, name: str) -> None:
        project = self._find(name)
        self.work.then.append(lambda: self.work.orchestrator.projects.put(project))
        self.work.then.append(self.work.orchestrator.users.note_change)
