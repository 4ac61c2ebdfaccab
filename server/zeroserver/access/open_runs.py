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
    """Cache of the runs that have not ended; used on the event loop's thread only.

    It saves a database query for each request of a run. Any change of a run removes it from the
    cache, so its end does too.
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
        """Check whether a run has ended; a run that does not exist has not.

        Args:
            read: Runs a query outside of the event loop.
            run_id: Number of the run.
        """
        if run_id in self._open:
            return False
        before = self._changes
        ended = await read(lambda connection: _has_ended(connection, run_id))
        if not ended and before == self._changes:  # else the answer may be older than a change
            self._open.add(run_id)
        return ended


def _has_ended(connection: Connection, run_id: int) -> bool:
    state = connection.scalar(select(runs.c.state).where(runs.c.id == run_id))
    return state == RunState.EXITED
