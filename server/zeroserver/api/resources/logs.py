"""Log lines."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Log", "LogPage"]


class Log(Resource, frozen=True):
    """Line of a log."""

    id: int
    """Id; increases in the order of arrival."""
    trial_id: int | None
    """Trial of the line."""
    run_id: int | None
    """Run of the line."""
    rank: int | None
    """Rank that wrote it; null for the agent and the server."""
    stream: Literal["stdout", "stderr", "agent", "server"]
    """Stream or process that wrote it."""
    level: str | None
    """`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`, if known."""
    text: str
    """Text of the line."""
    time: Time | None
    """Time of writing."""
    host: str | None
    """Host of the agent that sent it; null for the server."""


class LogPage(Resource, frozen=True):
    """Page of log lines."""

    logs: list[Log]
    next_after: int | None
