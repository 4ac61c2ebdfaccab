"""Routes of notification channels and their messages."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import Path, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, case, func, select

from zerolab.contract.notifications import DEFAULT_EVENTS, EventName, check_channel_name
from zerolab.errors import ConfigError
from zeroserver.access.routes import ACCESS, ADMIN, VIEWER
from zeroserver.api.common import Limit, Whole
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.notifications.delivery import Delivery
from zeroserver.extensions.notifications.messages import test_message
from zeroserver.extensions.notifications.resources import (
    Channel,
    ChannelAnswer,
    ChannelPage,
    Notification,
    NotificationPage,
    TestAnswer,
)
from zeroserver.extensions.notifications.service import (
    NotificationService,
    NotificationState,
    find_channel,
)
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ChannelRow, read_rows
from zeroserver.store.schema import notification_channels, notifications
from zeroserver.visibility import HIDDEN

__all__ = ["router"]

router = resource_router("/api/v1", "notifications")

ACCESS.update(
    {
        "GET /api/v1/notification-channels": VIEWER,
        "POST /api/v1/notification-channels": ADMIN,
        "DELETE /api/v1/notification-channels/{name}": ADMIN,
        "POST /api/v1/notification-channels/{name}/test": ADMIN,
        "GET /api/v1/notifications": VIEWER,
    }
)

ChannelPath = Annotated[str, Path(max_length=64)]


def _read(
    orchestrator: Orchestrator, connection: Connection, name: str | None = None
) -> list[Channel]:
    """Return all channels by name, or one, with what became of their messages.

    Channels of projects that the caller must not see are left out.
    """
    query = select(notification_channels).order_by(notification_channels.c.name)
    if name is not None:
        query = query.where(notification_channels.c.name == name)
    columns = notifications.c
    counts = select(
        columns.channel_id,
        func.sum(case((columns.state == "PENDING", 1), else_=0)).label("pending"),
        func.sum(case((columns.state == "FAILED", 1), else_=0)).label("failed"),
        func.max(case((columns.state == "SENT", columns.ended_at))).label("last_sent_at"),
    ).group_by(columns.channel_id)
    by_channel = {row.channel_id: row for row in connection.execute(counts)}
    channels = []
    for row in read_rows(connection, ChannelRow, query):
        if row.project_id in HIDDEN.get():
            continue
        figures = by_channel.get(row.id)
        channel = Channel.of(
            row,
            user=orchestrator.users.name_of(row.user_id) if row.user_id else None,
            project=orchestrator.projects.name_of(row.project_id) if row.project_id else None,
            pending=figures.pending if figures else 0,
            failed=figures.failed if figures else 0,
            last_sent_at=iso(figures.last_sent_at) if figures else None,
            error=_last_error(connection, row.id),
        )
        channels.append(channel)
    return channels


def _last_error(connection: Connection, channel_id: int) -> str | None:
    """Return the error of the message that was tried last; None if it was delivered."""
    columns = notifications.c
    tried = select(columns.error).where(columns.channel_id == channel_id, columns.attempts > 0)
    error: str | None = connection.scalar(tried.order_by(columns.id.desc()).limit(1))
    return error


async def _one(services: Services, name: str) -> Channel:
    def read(connection: Connection) -> Channel:
        find_channel(connection, name)
        return _read(services.orchestrator, connection, name)[0]

    return await services.read(read)


@router.get("/notification-channels")
async def list_notification_channels(services: ServicesDep) -> ChannelPage:
    """List the notification channels, without their URLs and secrets."""
    return await services.read(
        lambda connection: ChannelPage(channels=_read(services.orchestrator, connection))
    )


class NewChannel(BaseModel):
    """New notification channel."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, AfterValidator(check_channel_name)]
    url: Annotated[str, Field(min_length=1, max_length=4000)]
    """URL of a webhook, or of apprise."""
    kind: Literal["webhook", "apprise"] = "webhook"
    """``apprise`` sends through the services that apprise supports; needs the extra notify."""
    events: Annotated[list[EventName], Field(min_length=1)] = Field(
        default_factory=lambda: list(DEFAULT_EVENTS)
    )
    """Events of which it gets messages."""
    all_experiments: bool = False
    """Send messages about all experiments, not only about those that name the channel."""
    user: Annotated[str | None, Field(min_length=1, max_length=64)] = None
    """Send messages about all experiments of this user; with ``project``, about those in it."""
    project: Annotated[str | None, Field(min_length=1, max_length=64)] = None
    """Send messages about all experiments of this project."""


@router.post("/notification-channels", status_code=201)
async def create_notification_channel(services: ServicesDep, body: NewChannel) -> ChannelAnswer:
    """Add a channel; the response has the secret of a webhook, which is not shown again."""
    delivery = services.part(Delivery)
    if body.all_experiments and (body.user or body.project):
        contradiction = "all_experiments: must be false with user or project, got true"
        raise ConfigError("channel", [f"{contradiction}; leave one out"])
    problem = await delivery.problem_of(services.settings, body.kind, body.url)
    if problem is not None:
        raise ConfigError("channel", [problem])
    secret = await services.write(
        lambda work: NotificationService(work, services.part(NotificationState)).add(
            body.name,
            body.kind,
            body.url,
            _unique(body.events),
            all_experiments=body.all_experiments,
            user=body.user,
            project=body.project,
        )
    )
    return ChannelAnswer(await _one(services, body.name), secret or None)


def _unique(events: Sequence[EventName]) -> list[EventName]:
    return list(dict.fromkeys(events))


@router.delete("/notification-channels/{name}", status_code=204)
async def delete_notification_channel(services: ServicesDep, name: ChannelPath) -> Response:
    """Delete a channel and its messages; experiments that name it get no messages there."""
    await services.write(
        lambda work: NotificationService(work, services.part(NotificationState)).remove(name)
    )
    return Response(status_code=204)


@router.post("/notification-channels/{name}/test")
async def test_notification_channel(services: ServicesDep, name: ChannelPath) -> TestAnswer:
    """Send a test message to a channel, and wait for the result."""
    channel = await services.read(lambda connection: find_channel(connection, name))
    now = services.orchestrator.clock()
    message = msgspec.json.encode(test_message(name, now, services.url))
    message_id = f"{services.orchestrator.installation}-test-{now:.6f}"
    error = await services.part(Delivery).send(
        services.settings, channel, message_id, int(now), message
    )
    return TestAnswer(delivered=error is None, error=error)


@router.get("/notifications")
async def list_notifications(
    services: ServicesDep,
    channel: Annotated[
        str | None, Query(max_length=64, description="Only of this channel.")
    ] = None,
    experiment: Annotated[
        Whole | None, Query(ge=1, le=2**53, description="Only of this experiment.")
    ] = None,
    limit: Limit = 100,
) -> NotificationPage:
    """List the newest messages of the last 30 days, newest first."""

    def read(connection: Connection) -> NotificationPage:
        query = select(notifications, notification_channels.c.name.label("channel")).join(
            notification_channels, notification_channels.c.id == notifications.c.channel_id
        )
        query = query.where(notification_channels.c.project_id.not_in(HIDDEN.get()))
        if channel is not None:
            find_channel(connection, channel)
            query = query.where(notification_channels.c.name == channel)
        if experiment is not None:
            query = query.where(notifications.c.experiment_id == experiment)
        rows = connection.execute(query.order_by(notifications.c.id.desc()).limit(limit)).all()
        return NotificationPage(
            notifications=[
                Notification.of(row, title=msgspec.json.decode(row.message)["title"])
                for row in rows
            ]
        )

    return await services.read(read)
