"""The one check of owners: of the resource in a path, and of resources in a body."""

from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import Connection, Table, select

from zerolab.errors import ForbiddenError
from zeroserver.access.principal import Principal
from zeroserver.access.routes import Resource
from zeroserver.access.tokens import is_number
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

__all__ = ["Ownership"]

_TABLES: dict[Resource, Table] = {"share": shares, "view": views, "comment": comments}
"""Tables of other resources with an id and an owner."""

_Foreign = tuple[str, int] | None
"""Key and owner of a resource of another user."""


class Ownership:
    """Check that a caller may change resources, which belong to users.

    Args:
        users: Users of the installation.
        read: Function that runs a query outside of the event loop.
    """

    def __init__(
        self,
        users: UserDirectory,
        read: Callable[[Callable[[Connection], Any]], Awaitable[Any]],
    ) -> None:
        self._users = users
        self._read = read

    async def require(self, principal: Principal, kind: Resource, *keys: str) -> None:
        """Check that the caller may change resources; missing ones pass, for the route's 404.

        Args:
            principal: The caller.
            kind: Kind of the resources.
            keys: Their ids or names, as in paths.

        Raises:
            ForbiddenError: If one belongs to another user, and the caller is no administrator.
            ConfigError: If several checkpoints begin with the key.
        """
        if principal.is_admin:
            return
        if kind == "user":
            if set(keys) != {principal.user}:
                msg = "only administrators may see or change the tokens of other users"
                raise ForbiddenError(msg)
            return

        def find_foreign(connection: Connection) -> _Foreign:
            for key in keys:
                owner_id = _owner_id(connection, kind, key)
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
        """Check that a share link shows a resource; missing ones are refused alike.

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
        if number not in principal.experiment_ids:
            raise ForbiddenError(f"this share link does not show {kind} {key[:20]}")


def _owner_id(connection: Connection, kind: Resource, key: str) -> int | None:
    """Return the user to whom a resource belongs; None if there is no such resource."""
    owner = select(experiments.c.owner_id)
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
        query = select(projects.c.owner_id).where(projects.c.name == key)
    elif kind == "model":
        query = select(models.c.owner_id).where(models.c.name == key)
    else:
        table = _TABLES[kind]
        query = select(table.c.owner_id).where(table.c.id == number)
    owner_id: int | None = connection.scalar(query)
    return owner_id
