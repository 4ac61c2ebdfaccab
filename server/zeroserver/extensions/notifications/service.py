"""Channels and the outbox: stored, filled by events, and emptied by the sender."""

import secrets
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, or_, select

from zerolab.contract.notifications import EventName
from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zeroserver.extensions.notifications.messages import message_about
from zeroserver.orchestrator.service import DomainEvent, DomainTransaction, Service
from zeroserver.store.rows import ChannelRow, NotificationRow, read_row, read_rows
from zeroserver.store.schema import notification_channels, notifications
from zeroserver.visibility import HIDDEN

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.sections import NotifyConfig

__all__ = [
    "MOST_DELAY_S",
    "NotificationService",
    "NotificationState",
    "due_channels",
    "find_channel",
    "next_due",
    "next_notification",
]

FIRST_DELAY_S, MOST_DELAY_S = 10.0, 3600.0
"""Delay before the first retry, which doubles with each further one, and its maximum."""
GIVE_UP_S = 24 * 3600.0
"""Time after which a message that could not be delivered is dropped."""
KEPT_S = 30 * 24 * 3600.0
"""Time for which delivered and dropped messages are stored."""
_REMOVED_AT_ONCE = 1000
_UNLIMITED = frozenset({"finished", "failed", "canceled"})
"""Events that an experiment has once."""
_HOUR_S, _PER_HOUR = 3600.0, 10
"""Maximum number of messages to a channel about another event of an experiment in an hour."""
_STORED = "SELECT 1 FROM notifications WHERE channel_id = ? AND event_key = ?"
_COUNTS = (
    "SELECT channel_id, count(*) FROM notifications WHERE experiment_id = ? AND event = ? "
    "AND created_at > ? GROUP BY channel_id"
)
_SCOPE = "SELECT owner_id, project_id FROM experiments WHERE id = ?"
_CHANNELS = 100
_LAST = f"(This is message {_PER_HOUR} of this kind within an hour; further ones are not sent.)"
_INSERT = (
    "INSERT INTO notifications (channel_id, event_key, event, experiment_id, message, state, "
    "attempts, due_at, created_at) VALUES (?, ?, ?, ?, ?, 'PENDING', 0, ?, ?) "
    "ON CONFLICT (channel_id, event_key) DO NOTHING"
)


class NotificationState:
    """Memory of the extension: channels, and whether the outbox has changed."""

    def __init__(self) -> None:
        self.channels: list[ChannelRow] | None = None
        self.changed = True
        """Whether messages were stored since the sender has read the outbox."""
        self.server_url: Callable[[], str] = str

    def note_change(self) -> None:
        """Note that the outbox has changed."""
        self.changed = True


class NotificationService(Service):
    """Stores channels and messages.

    Args:
        work: The transaction.
        state: Memory of the extension.
    """

    def __init__(self, work: DomainTransaction, state: NotificationState) -> None:
        super().__init__(work)
        self.state = state

    def channels(self) -> list[ChannelRow]:
        """Return all channels, by name."""
        if self.state.channels is None:
            self.state.channels = read_rows(self.work.connection, ChannelRow, _ALL)
        return self.state.channels

    def _forget_channels(self) -> None:
        """Make the next transaction read the channels, also after a rollback of this one."""

        def forget() -> None:
            self.state.channels = None

        forget()
        self.work.undo.append(forget)

    def add(
        self,
        name: str,
        kind: str,
        url: str,
        events: list[EventName],
        *,
        all_experiments: bool = False,
        user: str | None = None,
        project: str | None = None,
    ) -> str:
        """Store a channel; return the secret that signs its messages, empty without signatures.

        Raises:
            ConflictError: If one has the name, or there are too many.
            NotFoundError: If there is no such user or project.
        """
        user_id, project_id = self._scope(user, project)
        existing = self.channels()
        if any(channel.name == name for channel in existing):
            msg = f"channel {name}: exists already; run `zerolab notify delete {name}` first"
            raise ConflictError(msg)
        if len(existing) >= _CHANNELS:
            raise ConflictError(f"there are {_CHANNELS} channels already; delete one first")
        secret = ""
        if kind == "webhook":
            secret = "whsec_" + b64encode(secrets.token_bytes(24)).decode()
        row = {
            "name": name,
            "kind": kind,
            "url": url,
            "secret": secret,
            "events": msgspec.json.encode(events).decode(),
            "all_experiments": int(all_experiments),
            "created_at": self.work.clock(),
            "user_id": user_id,
            "project_id": project_id,
        }
        self.work.connection.execute(notification_channels.insert().values(row))
        self._forget_channels()
        return secret

    def _scope(self, user: str | None, project: str | None) -> tuple[int, int]:
        """Return the ids of the user and the project of a channel; 0 without one."""
        owner = user and self.work.orchestrator.users.find(user)
        if user and not owner:
            raise NotFoundError(f"there is no user {user}; `zerolab user list` shows them")
        home = project and self.work.orchestrator.projects.find(project)
        if project and not home:
            raise NotFoundError(f"there is no project {project}; `zerolab project list` shows them")
        return (owner.id if owner else 0), (home.id if home else 0)

    def remove(self, name: str) -> None:
        """Delete a channel and its messages.

        Raises:
            NotFoundError: If there is no such channel.
        """
        channel = find_channel(self.work.connection, name)
        of_channel = notifications.c.channel_id == channel.id
        self.work.connection.execute(delete(notifications).where(of_channel))
        table = notification_channels
        self.work.connection.execute(delete(table).where(table.c.id == channel.id))
        self._forget_channels()

    def observe(self, event: DomainEvent) -> None:
        """Store the messages about an event.

        Raises:
            ConfigError: If a new experiment names an unknown channel.
        """
        if event.kind == "created":
            self._check_channels(event.experiment_id)
        elif self.channels():
            key = f"{event.kind}:{event.trial_id or event.experiment_id}"
            if event.kind != "nan":  # a trial that has diverged reports nothing else
                key += f":{secrets.token_hex(8)}"
            self.record(event.kind, event, key)

    def _check_channels(self, experiment_id: int) -> None:
        names = self.work.config(experiment_id).notify.channels
        hidden = self.work.hidden
        known = {item.name for item in self.channels() if item.project_id not in hidden}
        problems = [
            f"notify.channels[{index}]: must be a channel of the server, got {name!r}; "
            "`zerolab notify list` shows them, `zerolab notify add` adds one"
            for index, name in enumerate(names)
            if name not in known
        ]
        if problems:
            raise ConfigError("experiment", problems)

    def record(self, name: EventName, event: DomainEvent, key: str) -> None:
        """Store a message for each channel that wants it, once for each key.

        A channel gets at most ten messages about one kind of event of an experiment in an hour,
        except about its end.

        Args:
            name: Name of the event.
            event: The event.
            key: Identifies the event; repeated ones are ignored.
        """
        interested = list(self._interested(name, event.experiment_id, key))
        if not interested:
            return
        now, counts = self.work.clock(), dict[int, int]()
        if name not in _UNLIMITED:
            since = (event.experiment_id, name, now - _HOUR_S)
            counts.update((channel, count) for channel, count in self.work.raw(_COUNTS, since))
        message = message_about(self.work, name, event, self.state.server_url())
        content = msgspec.json.encode(message).decode()
        last = msgspec.structs.replace(message, text=f"{message.text}\n{_LAST}".strip())
        last_content = msgspec.json.encode(last).decode()
        for channel in interested:
            count = counts.get(channel.id, 0)
            if count < _PER_HOUR:
                body = last_content if count == _PER_HOUR - 1 else content
                values = (channel.id, key, name, event.experiment_id, body, now, now)
                self.work.run(_INSERT, values)
        self.work.then.append(self.state.note_change)

    def _interested(self, name: EventName, experiment_id: int, key: str) -> Iterator[ChannelRow]:
        """Yield the channels that get a message about an event and have none with its key."""
        notify = self.work.config(experiment_id).notify
        channels = self.channels()
        scope = 0, 0
        if any(channel.user_id or channel.project_id for channel in channels):
            ((owner_id, project_id),) = self.work.raw(_SCOPE, (experiment_id,))
            scope = owner_id, project_id
        for channel in channels:
            if name in wanted_events(channel, notify, scope) and not self.work.raw(
                _STORED, (channel.id, key)
            ):
                yield channel

    def settle(self, notification_id: int, error: str | None) -> None:
        """Store the result of an attempt: delivered, to be repeated, or given up.

        Args:
            notification_id: The message.
            error: Why it could not be delivered; None if it was.
        """
        query = select(notifications).where(notifications.c.id == notification_id)
        row = read_row(self.work.connection, NotificationRow, query)
        if row is None:  # its channel was deleted
            return
        now, attempts = self.work.clock(), row.attempts + 1
        delay = min(FIRST_DELAY_S * 2.0 ** min(attempts - 1, 32), MOST_DELAY_S)
        if error is None:
            values = {"state": "SENT", "ended_at": now, "error": None}
        elif now + delay > row.created_at + GIVE_UP_S:
            values = {"state": "FAILED", "ended_at": now, "error": error}
        else:
            values = {"due_at": now + delay, "error": error}
        self.work.save(notifications, row.id, attempts=attempts, **values)

    def expire(self) -> None:
        """Remove some old messages that were delivered or given up."""
        columns = notifications.c
        old = select(columns.id).where(
            columns.state.in_(["SENT", "FAILED"]),
            columns.ended_at < self.work.clock() - KEPT_S,
        )
        some = old.order_by(columns.id).limit(_REMOVED_AT_ONCE)
        self.work.connection.execute(delete(notifications).where(columns.id.in_(some)))


_ALL = select(notification_channels).order_by(notification_channels.c.name)


def wanted_events(
    channel: ChannelRow, notify: "NotifyConfig", scope: tuple[int, int]
) -> "list[EventName]":
    """Return the events of an experiment about which a channel gets messages.

    Args:
        channel: The channel.
        notify: Block of the experiment.
        scope: Ids of the owner and the project of the experiment.
    """
    named = channel.name in notify.channels
    if named and notify.events is not None:
        return notify.events
    if named or channel.all_experiments or _covers(channel, scope):
        events: list[EventName] = msgspec.json.decode(channel.events)
        return events
    return []


def _covers(channel: ChannelRow, scope: tuple[int, int]) -> bool:
    """Whether a channel is for the user, the project, or the user's experiments in the project."""
    wanted = channel.user_id, channel.project_id
    return any(wanted) and all(
        id_ in {0, actual} for id_, actual in zip(wanted, scope, strict=True)
    )


def find_channel(connection: Connection, name: str) -> ChannelRow:
    """Return the channel with a name.

    Raises:
        NotFoundError: If there is none, or its project is hidden from the caller of the request.
    """
    query = select(notification_channels).where(notification_channels.c.name == name)
    channel = read_row(connection, ChannelRow, query)
    if channel is None or channel.project_id in HIDDEN.get():
        raise NotFoundError(f"there is no channel {name}; `zerolab notify list` shows them")
    return channel


def next_due(connection: Connection) -> float | None:
    """Return the time at which the next message is due; None if none is pending."""
    columns = notifications.c
    due: float | None = connection.scalar(
        select(func.min(columns.due_at)).where(columns.state == "PENDING")
    )
    return due


def due_channels(connection: Connection, now: float) -> list[ChannelRow]:
    """Return the channels with messages to send now."""
    columns = notifications.c
    ids = select(columns.channel_id).where(columns.state == "PENDING", _is_due(now)).distinct()
    query = _ALL.where(notification_channels.c.id.in_(ids))
    return read_rows(connection, ChannelRow, query)


def next_notification(
    connection: Connection, channel_id: int, now: float
) -> NotificationRow | None:
    """Return the next message to send to a channel; None if none is due."""
    columns = notifications.c
    query = (
        select(notifications)
        .where(columns.channel_id == channel_id, columns.state == "PENDING", _is_due(now))
        .order_by(columns.due_at, columns.id)
        .limit(1)
    )
    return read_row(connection, NotificationRow, query)


def _is_due(now: float) -> ColumnElement[bool]:
    """Return the condition for due messages; the wall clock may have been set back."""
    columns = notifications.c
    return or_(columns.due_at <= now, columns.due_at > now + MOST_DELAY_S)
