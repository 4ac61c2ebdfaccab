"""Checks of owners and restricted projects, for resources in a path or a body."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from sqlalchemy import Connection, Table, select

from zerolab.errors import ForbiddenError, NotFoundError
from zeroserver.access.principal import Principal
from zeroserver.access.routes import OF_PROJECTS, Resource
from zeroserver.access.tokens import is_number
from zeroserver.store.project_directory import ProjectDirectory
from zeroserver.store.schema import (
    checkpoints,
    comments,
    experiments,
    models,
    projects,
    shares,
    trials,
    views,
)
from zeroserver.store.short_uuids import full_uuid
from zeroserver.store.user_directory import UserDirectory
from zeroserver.visibility import EVERYTHING, HIDDEN, hiding

__all__ = ["Ownership"]

_TABLES: dict[Resource, Table] = {"share": shares, "view": views, "comment": comments}
"""Tables of other resources with an id and an owner."""

_Key = tuple[str, int] | None
"""Key of a resource, and its owner or its project."""


class Ownership:
    """Check that a caller may see resources, and change those of other users.

    Args:
        users: Users of the installation.
        projects: Projects of the installation.
        read: Function that runs a query outside of the event loop.
    """

    def __init__(
        self,
        users: UserDirectory,
        projects: ProjectDirectory,
        read: Callable[[Callable[[Connection], Any]], Awaitable[Any]],
    ) -> None:
        self._users = users
        self._projects = projects
        self._read = read

    def hidden_from(self, principal: Principal) -> frozenset[int]:
        """Return the ids of the restricted projects that a caller must not see.

        A share link hides what its creator must not see any more.
        """
        user_id, is_admin = principal.user_id, principal.is_admin
        if principal.kind == "share":
            sharer = self._users.user(principal.sharer_id)
            user_id, is_admin = principal.sharer_id, sharer is not None and sharer.role == "admin"
        if user_id == 0 or is_admin:
            return EVERYTHING
        return self._projects.hidden_from(user_id)

    async def require_visible(self, kind: Resource, *keys: str) -> None:
        """Check that resources are in no project that is hidden from the current request.

        Args:
            kind: Kind of the resources.
            keys: Their ids or names, as in paths.

        Raises:
            NotFoundError: If one is; the message is that of a missing resource.
        """
        hidden = HIDDEN.get()
        if not hidden or kind not in OF_PROJECTS:
            return

        def find_hidden(connection: Connection) -> _Key:
            with hiding(EVERYTHING):
                for key in keys:
                    project_id = _column_of(connection, kind, key, "project_id")
                    if project_id in hidden:
                        return key, project_id
            return None

        found = await self._read(find_hidden)
        if found is not None:
            hint = _LISTS.get(kind, "")
            raise NotFoundError(f"there is no {kind} {found[0]}{hint}")

    async def require(self, principal: Principal, kind: Resource, *keys: str) -> None:
        """Check that the caller may change resources; missing ones pass, for the route's 404.

        Args:
            principal: The caller.
            kind: Kind of the resources.
            keys: Their ids or names, as in paths.

        Raises:
            ForbiddenError: If one belongs to another user, and the caller is no administrator.
            NotFoundError: If one is in a project that the caller must not see.
            ConfigError: If several checkpoints begin with the key.
        """
        if principal.is_admin:
            return
        if kind == "user":
            if set(keys) != {principal.user}:
                msg = "only administrators may see or change the tokens of other users"
                raise ForbiddenError(msg)
            return

        await self.require_visible(kind, *keys)

        def find_foreign(connection: Connection) -> _Key:
            for key in keys:
                owner_id = _column_of(connection, kind, key, "owner_id")
                if owner_id is not None and owner_id != principal.user_id:
                    return key, owner_id
            return None

        foreign = await self._read(find_foreign)
        if foreign is not None:
            key, owner_id = foreign
            owner = self._users.name_of(owner_id)
            msg = f"{kind} {key} belongs to {owner}; only {owner} or an administrator may do this"
            raise ForbiddenError(msg)

    async def require_shown(self, principal: Principal, kind: Resource, key: str) -> None:
        """Check that a share link shows a resource; missing and hidden ones are refused alike.

        Args:
            principal: Caller with a share link.
            kind: ``experiment`` or ``trial``.
            key: Its id, as in the path.

        Raises:
            ForbiddenError: If the link does not show it.
        """
        number = int(key) if is_number(key) else 0
        if kind == "trial":
            query = select(trials.c.experiment_id).where(trials.c.id == number)
            number = await self._read(lambda connection: connection.scalar(query)) or 0
        elif HIDDEN.get():
            query = select(experiments.c.id).where(experiments.c.id == number)
            number = await self._read(lambda connection: connection.scalar(query)) or 0
        if number not in principal.experiment_ids:
            raise ForbiddenError(f"this share link does not show {kind} {key[:20]}")


_LISTS: dict[Resource, str] = {
    "project": "; `zerolab project list` lists them",
    "model": "; `zerolab model list` shows them",
}
"""Ends of the messages about missing resources."""


def _column_of(
    connection: Connection, kind: Resource, key: str, column: Literal["owner_id", "project_id"]
) -> int | None:
    """Return the owner or the project of a resource; None if there is no such resource."""
    owner = select(experiments.c[column])
    number = int(key) if is_number(key) else 0
    if kind == "experiment":
        query = owner.where(experiments.c.id == number)
    elif kind == "trial":
        query = owner.join(trials, trials.c.experiment_id == experiments.c.id)
        query = query.where(trials.c.id == number)
    elif kind == "checkpoint":
        query = owner.join(checkpoints, checkpoints.c.experiment_id == experiments.c.id)
        query = query.where(checkpoints.c.uuid == full_uuid(connection, key))
    elif kind == "project":
        of_project = projects.c.id if column == "project_id" else projects.c.owner_id
        query = select(of_project).where(projects.c.name == key)
    elif kind == "model":
        query = select(models.c[column]).where(models.c.name == key)
    elif column == "project_id":
        query = owner.join(comments, comments.c.experiment_id == experiments.c.id)
        query = query.where(comments.c.id == number)
    else:
        table = _TABLES[kind]
        query = select(table.c.owner_id).where(table.c.id == number)
    value: int | None = connection.scalar(query)
    return value
