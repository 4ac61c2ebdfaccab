"""Live interactive tasks: their waiting tunnels, last use and idle timeouts; kept in memory only.

The process of a task opens tunnels to the server, which thus never has to reach its machine. A
tunnel waits here until a request needs it; then the task opens another one.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from zeroserver.access.upgrades import ByteStream

__all__ = ["MAX_WAITING", "Endpoint", "Endpoints", "TaskKind"]

TaskKind = Literal["notebook", "tensorboard", "shell", "port"]
"""Program of a task; ``port`` for any command."""

MAX_WAITING = 16
"""Maximum number of waiting tunnels of a task."""
_SILENT_S = 60.0
"""Seconds without a report or a tunnel after which a task is forgotten."""


class Endpoint(msgspec.Struct, eq=False):
    """Port of a running task."""

    experiment_id: int
    run_id: int
    owner_id: int | None
    kind: TaskKind
    idle_timeout_s: float | None = None
    user: str = ""
    """User name on the machine, for ssh."""
    host_key: str = ""
    """Public key of a shell's sshd."""
    last_used: float = msgspec.field(default_factory=time.monotonic)
    last_seen: float = msgspec.field(default_factory=time.monotonic)
    pool: Any = None
    """Connection pool of requests through the tunnels."""
    _tunnels: deque[ByteStream] = msgspec.field(default_factory=deque)
    _waiters: deque["asyncio.Future[ByteStream]"] = msgspec.field(default_factory=deque)

    def touch(self) -> None:
        """Record that the task is used."""
        self.last_used = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last use."""
        return time.monotonic() - self.last_used

    @property
    def is_ready(self) -> bool:
        """Whether a tunnel is waiting."""
        return any(not tunnel.closed for tunnel in self._tunnels)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of tunnels is waiting."""
        self._drop_closed()
        return len(self._tunnels) >= MAX_WAITING

    def add_tunnel(self, tunnel: ByteStream) -> None:
        """Hand a tunnel to the first request that waits for one, or keep it."""
        self.last_seen = time.monotonic()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(tunnel)
                return
        self._tunnels.append(tunnel)

    async def take_tunnel(self, timeout_s: float | None) -> ByteStream:
        """Return a tunnel to the port of the task.

        Raises:
            TimeoutError: If the task opens none in time.
        """
        self._drop_closed()
        if self._tunnels:
            return self._tunnels.popleft()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await asyncio.wait_for(waiter, timeout_s)

    def close(self) -> None:
        """Close the waiting tunnels."""
        while self._tunnels:
            self._tunnels.popleft().close()

    def _drop_closed(self) -> None:
        self._tunnels = deque(tunnel for tunnel in self._tunnels if not tunnel.closed)


class Endpoints:
    """Live tasks of this server by experiment; used only on the event loop's thread."""

    def __init__(self) -> None:
        self._by_experiment: dict[int, Endpoint] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        """Iterate over the tasks that have reported lately."""
        self._forget_silent()
        return iter(list(self._by_experiment.values()))

    def find(self, experiment_id: int) -> Endpoint | None:
        """Return a task; None if it is not running, or has no port."""
        self._forget_silent()
        return self._by_experiment.get(experiment_id)

    def of_run(self, run_id: int) -> Endpoint | None:
        """Return the task of a run."""
        return next((item for item in self if item.run_id == run_id), None)

    def remove(self, endpoint: Endpoint) -> None:
        """Forget a task that has ended."""
        endpoint.close()
        if self._by_experiment.get(endpoint.experiment_id) is endpoint:
            del self._by_experiment[endpoint.experiment_id]

    def put(self, endpoint: Endpoint) -> Endpoint:
        """Add a task, or update the same run of it; return what is stored."""
        before = self._by_experiment.get(endpoint.experiment_id)
        if before is not None and before.run_id == endpoint.run_id:
            return before
        if before is not None:
            before.close()
        self._by_experiment[endpoint.experiment_id] = endpoint
        return endpoint

    def _forget_silent(self) -> None:
        limit = time.monotonic() - _SILENT_S
        for endpoint in list(self._by_experiment.values()):
            if endpoint.last_seen < limit:
                self.remove(endpoint)
