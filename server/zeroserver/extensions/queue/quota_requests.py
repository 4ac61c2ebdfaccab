"""Requests of users for more slots, which administrators approve or decline."""

from sqlalchemy import Connection, delete, select

from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zeroserver.extensions.queue.resources import QuotaRequest
from zeroserver.extensions.queue.service import QueueService
from zeroserver.orchestrator.cluster.scheduler_input import EVERY_USER, read_quotas
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.store.rows import QuotaRequestRow, read_row, read_rows
from zeroserver.store.schema import quota_requests, quotas
from zeroserver.store.user_directory import UserDirectory

__all__ = ["QuotaRequestService", "request_list"]


class QuotaRequestService(Service):
    """Stores requests, and changes quotas when they are approved."""

    queue = Uses(QueueService)

    def create(self, user_id: int, max_slots: int, reason: str) -> int:
        """Store a request, which replaces the user's open one, and return its id.

        Args:
            user_id: User who needs more slots.
            max_slots: Requested quota.
            reason: Why, for the administrator.

        Raises:
            ConflictError: If no quota limits the user.
            ConfigError: If it is not more than the quota, or more than a user may request.
        """
        name, current = self._quota_of(user_id)
        if current is None:
            raise ConflictError(f"user {name} has no quota, so there is nothing to request")
        query = select(quotas.c.request_limit).where(quotas.c.group_name == EVERY_USER)
        limit: int | None = self.work.connection.scalar(query)
        if max_slots <= current:
            problem = f"max_slots: must be more than {current}, the quota of user {name}"
            raise ConfigError("request", [f"{problem}, got {max_slots}"])
        if limit is not None and max_slots > limit:
            problem = f"max_slots: must be at most {limit}, the most that a user may request"
            raise ConfigError("request", [f"{problem}, got {max_slots}; request fewer slots"])
        columns = quota_requests.c
        is_replaced = (columns.user_id == user_id) & (columns.state == "OPEN")
        self.work.connection.execute(delete(quota_requests).where(is_replaced))
        row = {
            "user_id": user_id,
            "max_slots": max_slots,
            "reason": reason,
            "state": "OPEN",
            "created_at": self.work.clock(),
        }
        statement = quota_requests.insert().values(row).returning(columns.id)
        return int(self.work.connection.execute(statement).scalar_one())

    def decide(self, request_id: int, admin_id: int, answer: str, *, approved: bool) -> None:
        """Approve or decline a request; an approved one sets the quota of its user.

        Args:
            request_id: The request.
            admin_id: User who decides.
            answer: Why, for the user.
            approved: Whether the user gets the quota.

        Raises:
            NotFoundError: If there is no such request.
            ConflictError: If it was decided, or the quota is as large already.
        """
        row = _find(self.work.connection, request_id)
        if row.state != "OPEN":
            raise ConflictError(f"request {request_id} is {row.state} already")
        name, current = self._quota_of(row.user_id)
        if approved:
            if current is None or current >= row.max_slots:
                has = "has no quota" if current is None else f"has a quota of {current} slots"
                msg = f"request {request_id} is for {row.max_slots} slots, but user {name} {has}"
                raise ConflictError(f"{msg}; decline it")
            self.queue.set_quota("user", name, row.max_slots)
        self.work.save(
            quota_requests,
            request_id,
            state="APPROVED" if approved else "DECLINED",
            decided_at=self.work.clock(),
            decided_by=admin_id,
            answer=answer,
        )

    def _quota_of(self, user_id: int) -> tuple[str, int | None]:
        """Return the name of a user, and the user's quota, if there is one."""
        directory = self.work.orchestrator.users
        name = directory.name_of(user_id)
        return name, read_quotas(self.work.connection, directory.users()).get(f"user:{name}")


def _find(connection: Connection, request_id: int) -> QuotaRequestRow:
    query = select(quota_requests).where(quota_requests.c.id == request_id)
    row = read_row(connection, QuotaRequestRow, query)
    if row is None:
        raise NotFoundError(
            f"there is no request {request_id}; `zerolab quota requests` lists them"
        )
    return row


def request_list(
    connection: Connection,
    directory: UserDirectory,
    *,
    state: str | None = None,
    request_id: int | None = None,
    limit: int = 1,
) -> list[QuotaRequest]:
    """Return the newest requests.

    Args:
        connection: Database connection.
        directory: Users of the installation.
        state: Only requests in this state.
        request_id: Only this request.
        limit: Maximum number of requests.

    Raises:
        NotFoundError: If there is no such request.
    """
    query = select(quota_requests).order_by(quota_requests.c.id.desc()).limit(limit)
    if state is not None:
        query = query.where(quota_requests.c.state == state)
    rows = (
        read_rows(connection, QuotaRequestRow, query)
        if request_id is None
        else [_find(connection, request_id)]
    )
    return [
        QuotaRequest.of(
            row,
            user=directory.name_of(row.user_id),
            decided_by=None if row.decided_by is None else directory.name_of(row.decided_by),
        )
        for row in rows
    ]
