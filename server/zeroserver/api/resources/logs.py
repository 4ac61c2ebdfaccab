"""Lines of logs."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Log", "LogPage"]


class Log(Resource, frozen=True):
    """One line of a log."""

    id: int
    """Number; lines come in the order in which they arrived."""
    trial_id: int | None
    """Whose line it is."""
    run_id: int | None
    """Of which run."""
    rank: int | None
    """Who wrote it; null for the agent and the server."""
    stream: Literal["stdout", "stderr", "agent", "server"]
    """Where it was written."""
    level: str | None
    """`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL` where it is known."""
    text: str
    """The line."""
    time: Time | None
    """When it was written."""
    host: str | None
    """Host of the agent that sent it; null for the server."""


class LogPage(Resource, frozen=True):
    """A page of log lines."""

    logs: list[Log]
    next_after: int | None
