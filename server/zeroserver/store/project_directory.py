"""Projects: their names in memory, for responses, and the choice of one for new experiments."""

from collections import defaultdict
from collections.abc import Collection
from operator import attrgetter

from sqlalchemy import Connection, select

from zerolab.contract.names import DEFAULT_PROJECT, check_project
from zerolab.errors import ConfigError, ConflictError
from zeroserver.store.rows import ProjectRow, read_rows
from zeroserver.store.schema import project_members, projects
from zeroserver.visibility import EVERYTHING, HIDDEN

__all__ = ["FIRST_PROJECT", "ProjectDirectory", "open_project"]

FIRST_PROJECT = ProjectRow(1, DEFAULT_PROJECT, "", "", 0, 1, 0.0)
"""The project of experiments and models that name none; it cannot be archived."""


class ProjectDirectory:
    """Projects of the installation; entries are replaced, never modified.

    In a request, projects that its caller must not see count as missing.
    """

    def __init__(self) -> None:
        self._projects: dict[int, ProjectRow] = {FIRST_PROJECT.id: FIRST_PROJECT}
        self._members: dict[int, frozenset[int]] = {}
        """Ids of the users of each project, besides its owner."""
        self._restricted: tuple[ProjectRow, ...] = ()

    def load(self, connection: Connection) -> None:
        """Read all projects and members; called once, at startup."""
        for project in read_rows(connection, ProjectRow, select(projects)):
            self.put(project)
        members: defaultdict[int, set[int]] = defaultdict(set)
        for project_id, user_id in connection.execute(select(project_members)):
            members[project_id].add(user_id)
        for project_id, user_ids in members.items():
            self.put_members(project_id, user_ids)

    def put(self, project: ProjectRow) -> None:
        """Add or replace a project, after its transaction."""
        self._projects = {**self._projects, project.id: project}
        self._restricted = tuple(item for item in self._projects.values() if item.restricted)

    def put_members(self, project_id: int, user_ids: Collection[int]) -> None:
        """Replace the members of a project, after the transaction."""
        self._members = {**self._members, project_id: frozenset(user_ids)}

    def members_of(self, project: ProjectRow) -> frozenset[int]:
        """Return the ids of the users who see a restricted project: its owner and members."""
        return self._members.get(project.id, EVERYTHING) | {project.owner_id}

    def hidden_from(self, user_id: int) -> frozenset[int]:
        """Return the ids of the restricted projects that a user must not see."""
        if not self._restricted:
            return EVERYTHING
        return frozenset(
            item.id for item in self._restricted if user_id not in self.members_of(item)
        )

    def projects(self) -> list[ProjectRow]:
        """Return all projects, sorted by name."""
        hidden = HIDDEN.get()
        visible = (item for item in self._projects.values() if item.id not in hidden)
        return sorted(visible, key=attrgetter("name"))

    def find(self, name: str) -> ProjectRow | None:
        """Return the project with a name; None if there is none."""
        return next((item for item in self.projects() if item.name == name), None)

    def name_of(self, project_id: int) -> str:
        """Return the name of a project."""
        return self._projects[project_id].name

    def shown_name(self, project_id: int) -> str | None:
        """Return the name of a project; None while the installation has a single one."""
        return self._projects[project_id].name if len(self._projects) > 1 else None


def open_project(
    connection: Connection,
    name: str | None,
    subject: str = "experiment",
    hidden: Collection[int] = EVERYTHING,
) -> int:
    """Return the id of a project that accepts experiments and models.

    Args:
        connection: Connection of the transaction that adds to the project.
        name: Name of the project; None for ``default``.
        subject: What the error is about.
        hidden: Ids of the projects that the caller must not see.

    Raises:
        ConfigError: If the name is invalid, or there is no such project.
        ConflictError: If it is archived.
    """
    if name is None or name == DEFAULT_PROJECT:
        return FIRST_PROJECT.id
    try:
        check_project(name)
    except ValueError as error:
        raise ConfigError(subject, [f"project: {error}"]) from None
    visible = projects.c.id.not_in(hidden)
    query = select(projects.c.id, projects.c.archived).where(projects.c.name == name, visible)
    row = connection.execute(query).one_or_none()
    if row is None:
        known = connection.scalars(
            select(projects.c.name).where(visible).order_by(projects.c.name)
        ).all()
        problem = f"project: must be one of {', '.join(known)}, got {name!r}"
        raise ConfigError(subject, [f"{problem}; `zerolab project create {name}` creates it"])
    if row.archived:
        msg = (
            f"project {name} is archived and accepts nothing new; use another project, or "
            f"`zerolab project unarchive {name}`"
        )
        raise ConflictError(msg)
    return int(row.id)
