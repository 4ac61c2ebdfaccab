"""JSON resources of notification channels."""

from zeroserver.api.rows import Resource, Time

__all__ = [
    "Channel",
    "ChannelAnswer",
    "ChannelPage",
    "Notification",
    "NotificationPage",
    "TestAnswer",
]


class Channel(Resource, frozen=True):
    """Notification channel; its URL is never returned."""

    name: str
    """Name of the channel."""
    kind: str
    """``webhook`` or ``apprise``."""
    events: list[str]
    """Events of which it gets messages."""
    all_experiments: bool
    """Whether it gets messages about all experiments, not only those that name it."""
    user: str | None
    """User about whose experiments it gets messages, too; with ``project``, only those in it."""
    project: str | None
    """Project about whose experiments it gets messages, too."""
    pending: int
    """Number of messages that are still to be sent."""
    failed: int
    """Number of messages that were given up in the last 30 days."""
    last_sent_at: Time | None
    """Time of the last delivered message."""
    error: str | None
    """Why the newest message that has an error was not delivered; null after a delivery."""
    created_at: Time | None
    """Time of creation."""


class ChannelAnswer(Resource, frozen=True):
    """Response with one channel."""

    channel: Channel
    secret: str | None = None
    """Secret that signs the messages of a webhook; only in the response to its creation."""


class ChannelPage(Resource, frozen=True):
    """Response with all channels, sorted by name."""

    channels: list[Channel]
    next_after: None = None


class TestAnswer(Resource, frozen=True):
    """Result of a test message."""

    delivered: bool
    """Whether the receiver has accepted it."""
    error: str | None
    """Why not."""


class Notification(Resource, frozen=True):
    """Message to a channel."""

    id: int
    """Number of the message."""
    channel: str
    """Name of its channel."""
    event: str
    """Name of the event."""
    experiment_id: int
    """Experiment of the event."""
    title: str
    """Title of the message."""
    state: str
    """PENDING, SENT or FAILED."""
    attempts: int
    """Number of attempts to send it."""
    error: str | None
    """Error of the last attempt."""
    created_at: Time | None
    """Time of the event."""
    ended_at: Time | None
    """Time at which it was delivered or given up."""


class NotificationPage(Resource, frozen=True):
    """Response with the newest messages, newest first."""

    notifications: list[Notification]
    next_after: None = None
