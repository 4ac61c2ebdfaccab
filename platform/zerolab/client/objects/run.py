"""Runs of a trial."""

from datetime import datetime
from typing import ClassVar

from zerolab.client.objects.server_object import ServerObject

__all__ = ["Run"]


class Run(ServerObject):
    """One continuous execution of a trial.

    Example:
        >>> client = zerolab.Client()
        >>> (run,) = client.trial(1).runs()
        >>> run.state, run.exit_code, run.ended_at > run.started_at
        ('EXITED', 0, True)
    """

    _shown: ClassVar = ("id", "state", "exit_code")
    _row: ClassVar = ("id", "state", "agents", "started_at", "ended_at", "exit_code", "reason")

    id: int
    """Id, from 1, unique over all trials."""
    trial_id: int
    """Its trial."""
    state: str
    """``ASSIGNED``, ``RUNNING`` or ``EXITED``."""
    agents: list[str]
    """Names of the agents whose slots it holds or held."""
    created_at: datetime
    """Time when it got its slots."""
    started_at: datetime | None
    """Time when its ranks started."""
    ended_at: datetime | None
    """Time when it released its slots."""
    exit_code: int | None
    """Exit code of its launcher; None while it runs or if unknown."""
    reason: str | None
    """Why it ended, if it did not complete."""
    failed: bool
    """Whether it ended with an error."""
