"""Changes of users and their API tokens."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Select, delete, func, select, update

from zerolab.errors import ConflictError, NotFoundError
from zeroserver.access.routes import Role
from zeroserver.orchestrator.service import Service
from zeroserver.services import Services
from zeroserver.store.rows import TokenRow, UserRow, read_row, read_rows
from zeroserver.store.schema import audit, tokens, users
from zeroserver.store.user_directory import ADMIN, digest_of

__all__ = ["AuditRetention", "LastUse", "UserChange", "UserService"]

_MAX_TOKENS = 100
"""Maximum number of tokens of a user, all of which are in memory."""

_STORE_S = 60.0
"""Interval between updates of the last use of tokens."""
_EXPIRY_S, _REMOVED_AT_ONCE = 3600.0, 1000


class UserChange(msgspec.Struct, frozen=True):
    """Changes of a user; None keeps a value."""

    role: Role | None = None
    active: bool | None = None
    """Whether the user may sign in."""
    weight: float | None = None
    """Share of the slots, relative to other users."""


class UserService(Service):
    """Creates and changes users and their tokens; the directory in memory follows the commit."""

    def create(self, name: str, role: Role) -> None:
        """Create a user.

        Raises:
            ConflictError: If one has the name already.
        """
        if self._read(name) is not None:
            msg = f"user {name}: exists already; `zerolab user set-role` changes the role"
            raise ConflictError(msg)
        row = {"name": name, "role": role, "created_at": self.work.clock()}
        self.work.connection.execute(users.insert().values(row))
        self._publish(name)

    def change(self, name: str, change: UserChange) -> None:
        """Change a user; deactivation revokes the tokens.

        Raises:
            NotFoundError: If there is no such user.
            ConflictError: If it is the first administrator.
        """
        user = self.find(name)
        if user.id == ADMIN.id and (change.role not in {None, "admin"} or change.active is False):
            msg = (
                f"user {name}: has the token of the installation and stays an active "
                "administrator; use `zerolab token --renew` if others know the token"
            )
            raise ConflictError(msg)
        active = user.active if change.active is None else int(change.active)
        weight = user.weight if change.weight is None else change.weight
        values = {"role": change.role or user.role, "active": active, "weight": weight}
        query = update(users).where(users.c.id == user.id).values(values)
        self.work.connection.execute(query)
        if not active:
            for token in read_rows(self.work.connection, TokenRow, _tokens_of(user)):
                self._remove_token(token.id)
        self._publish(name)

    def set_password(self, name: str, stored: str | None) -> None:
        """Store the hash of a password, or remove it.

        Raises:
            NotFoundError: If there is no such user.
        """
        user = self.find(name)
        query = update(users).where(users.c.id == user.id).values(password=stored)
        self.work.connection.execute(query)
        self._publish(name)

    def create_token(self, name: str, secret: str, label: str, expires_at: float | None) -> int:
        """Store the hash of a new token, remove expired ones of the user, and return its id.

        Raises:
            NotFoundError: If there is no such user.
            ConflictError: If the user is not active or has too many tokens.
        """
        user = self.find(name)
        if not user.active:
            raise ConflictError(f"user {name}: is not active; `zerolab user activate {name}`")
        rows = read_rows(self.work.connection, TokenRow, _tokens_of(user))
        for expired in rows:
            if expired.expires_at is not None and expired.expires_at <= time.time():
                self._remove_token(expired.id)
        count = select(func.count()).select_from(tokens).where(tokens.c.user_id == user.id)
        if (self.work.connection.scalar(count) or 0) >= _MAX_TOKENS:
            msg = f"user {name}: has {_MAX_TOKENS} tokens; revoke one with `zerolab token revoke`"
            raise ConflictError(msg)
        row = {
            "user_id": user.id,
            "name": label,
            "digest": digest_of(secret),
            "created_at": time.time(),
            "expires_at": expires_at,
        }
        insert = tokens.insert().values(row).returning(tokens)
        token = TokenRow(*self.work.connection.execute(insert).one())
        self.work.then.append(lambda: self.work.orchestrator.users.put_token(token))
        return token.id

    def revoke(self, name: str, token_id: int) -> None:
        """Delete a token; it and the browser sessions of its links are invalid at once.

        Raises:
            NotFoundError: If the user has no such token.
        """
        query = _tokens_of(self.find(name)).where(tokens.c.id == token_id)
        if read_row(self.work.connection, TokenRow, query) is None:
            msg = f"user {name} has no token {token_id}; `zerolab token list` lists them"
            raise NotFoundError(msg)
        self._remove_token(token_id)

    def store_use(self, used: Mapping[int, float]) -> None:
        """Store the last use of tokens."""
        self.work.many(
            "UPDATE tokens SET last_used_at = ? WHERE id = ?",
            [(moment, token_id) for token_id, moment in used.items()],
        )

    def find(self, name: str) -> UserRow:
        """Return a user.

        Raises:
            NotFoundError: If there is no such user.
        """
        user = self._read(name)
        if user is None:
            raise NotFoundError(f"there is no user {name}; `zerolab user list` lists them")
        return user

    def _read(self, name: str) -> UserRow | None:
        return read_row(self.work.connection, UserRow, select(users).where(users.c.name == name))

    def _publish(self, name: str) -> None:
        user = self.find(name)
        self.work.then.append(lambda: self.work.orchestrator.users.put_user(user))

    def _remove_token(self, token_id: int) -> None:
        self.work.connection.execute(delete(tokens).where(tokens.c.id == token_id))
        self.work.then.append(lambda: self.work.orchestrator.users.remove_token(token_id))


def _tokens_of(user: UserRow) -> Select[Any]:
    return select(tokens).where(tokens.c.user_id == user.id).order_by(tokens.c.id)


class AuditRetention:
    """Deletes entries of the audit log after ``--audit-days``, some with each tick.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._due_at = 0.0

    async def tick(self) -> None:
        """Delete some old entries, once an hour or until none is left."""
        now = self._services.orchestrator.steady()
        if now < self._due_at:
            return
        days = self._services.settings.limits.audit_days
        if days is None:
            return
        oldest = self._services.orchestrator.clock() - days * 86400.0
        columns = audit.c
        some = select(columns.id, columns.time).order_by(columns.id).limit(_REMOVED_AT_ONCE)
        first = some.subquery()
        old = select(first.c.id).where(first.c.time < oldest)
        removed = await self._services.write(
            lambda work: work.connection.execute(delete(audit).where(columns.id.in_(old))).rowcount
        )
        if removed < _REMOVED_AT_ONCE:
            self._due_at = now + _EXPIRY_S

    def close(self) -> None:
        """Do nothing: the next server continues."""


class LastUse:
    """Stores the last use of tokens once a minute; a request that uses one writes nothing."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._due_at = 0.0

    async def tick(self) -> None:
        """Store what was used since the last time."""
        directory = self._services.orchestrator.users
        if not directory.used or time.monotonic() < self._due_at:
            return
        used = dict(directory.used)
        await self._services.write(lambda work: UserService(work).store_use(used))
        for token_id, moment in used.items():
            directory.stored_use(token_id, moment)
        self._due_at = time.monotonic() + _STORE_S

    def close(self) -> None:
        """Do nothing: at most a minute is lost."""
