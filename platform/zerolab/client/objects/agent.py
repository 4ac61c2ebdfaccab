"""Agents of the cluster."""

from datetime import datetime
from typing import Any, ClassVar, Self

from zerolab.client.objects.server_object import ServerObject

__all__ = ["Agent"]


class Agent(ServerObject):
    """Machine that offers slots.

    Example:
        >>> client = zerolab.Client()
        >>> agent = client.agents()[0]
        >>> agent.alive, len(agent.slots)
        (True, 2)
    """

    _shown: ClassVar = ("id", "name", "state")
    _row: ClassVar = ("id", "name", "host", "pool", "state", "enabled")

    id: int
    """Id, from 1."""
    name: str
    """Unique name."""
    host: str
    """Name of the machine."""
    pool: str
    """Resource pool."""
    alive: bool
    """Whether it is not lost."""
    state: str
    """``ready``, ``draining``, ``disabled``, ``silent``, ``leaving`` or ``gone``."""
    enabled: bool
    """Whether users allow new runs on it."""
    silent_s: float
    """Seconds since its last request."""
    slots: list[dict[str, Any]]
    """Its devices: ``id``, ``device``, ``enabled``, ``down``, the run that holds it (``run_id``,
    ``trial_id``, ``experiment_id``, ``experiment``, ``owner``), and ``load``."""
    registered_at: datetime
    """Time of its last registration."""
    load: dict[str, Any] | None
    """Load of the machine: CPU, memory, disk; None if unknown."""

    def disable(self, *, drain: bool = False) -> Self:
        """Start no more runs on it.

        Args:
            drain: Its runs finish; otherwise they checkpoint and continue elsewhere.

        Returns:
            The agent, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.agents()[0].disable(drain=True).enabled
            False
        """
        return self._update(self._client.agent_action(self.id, "disable", drain=drain))

    def enable(self) -> Self:
        """Allow new runs on it again.

        Returns:
            The agent, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> agent = client.agents()[0]
            >>> agent.enable().enabled
            True
            >>> agent.disable().enabled
            False
        """
        return self._update(self._client.agent_action(self.id, "enable"))
