"""Check whether a run is open: the token of a run expires when the run ends."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sqlalchemy import Connection, select

from zeroserver.states import RunState
from zeroserver.store.database import Change
from zeroserver.store.schema import runs

__all__ = ["OpenRuns"]

T = TypeVar("T")

_TOPIC = "run:"


class OpenRuns:
    """Cache of runs that have not ended; used only on the event loop's thread.

    It saves a database query for each request of a run. Every change of a run, including its end,
    removes it from the cache.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._changes = 0

    def note(self, changes: Iterable[Change]) -> None:
        """Remove the runs that have changed; called after each commit."""
        for change in changes:
            if change.topic.startswith(_TOPIC):
                self._open.discard(int(change.topic.removeprefix(_TOPIC)))
                self._changes += 1

    async def has_ended(
        self, read: Callable[[Callable[[Connection], bool]], Awaitable[bool]], run_id: int
    ) -> bool:
        """Check whether a run has ended; False for a missing run.

        Args:
            read: Function that runs a query outside of the event loop.
            run_id: Id of the run.
        """
        if run_id in self._open:
            return False
        before = self._changes
        ended = await read(lambda connection: _has_ended(connection, run_id))
        if not ended and before == self._changes:  # else the result may be outdated
            self._open.add(run_id)
        return ended


def _has_ended(connection: Connection, run_id: int) -> bool:
    state = connection.scalar(select(runs.c.state).where(runs.c.id == run_id))
    return state == RunState.EXITED
