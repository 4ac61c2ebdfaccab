"""Supervisor that ends external runs whose process does not report any more."""

from zeroserver.extensions.external_runs.service import ExternalRunService, open_external_runs
from zeroserver.services import Services

__all__ = ["LOST_S", "ExternalRunWatch", "Heartbeats"]

LOST_S = 600.0
"""Time without a report, a log line or a heartbeat after which a run counts as lost."""
_INTERVAL_S = 5.0
"""Time between two checks."""


class Heartbeats:
    """Number of heartbeats of each external run."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, run_id: int) -> None:
        """Count a heartbeat."""
        self.counts[run_id] = self.counts.get(run_id, 0) + 1


class ExternalRunWatch:
    """Ends runs that are lost, and runs that a user has killed.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._heartbeats = services.part(Heartbeats)
        self._activity: dict[int, tuple[tuple[int, int, int], float]] = {}
        """Last known activity of each run, and since when it is the same."""
        self._next_check = 0.0

    async def tick(self) -> None:
        """Check all open external runs, if a check is due."""
        now = self._services.orchestrator.steady()
        if now < self._next_check:
            return
        self._next_check = now + _INTERVAL_S
        activity = {}
        for run_id, records, lines, killed in await self._services.read(open_external_runs):
            state = records, lines, self._heartbeats.counts.get(run_id, 0)
            before, since = self._activity.get(run_id, (state, now))
            activity[run_id] = state, since if before == state else now
            silent_s = now - activity[run_id][1]
            if killed or silent_s >= LOST_S:
                del activity[run_id]  # it may be opened again
                await self._end(run_id, _LOST if not killed else "killed")
        self._activity = activity
        self._heartbeats.counts = {
            run_id: count for run_id, count in self._heartbeats.counts.items() if run_id in activity
        }

    async def _end(self, run_id: int, reason: str) -> None:
        await self._services.write(lambda work: ExternalRunService(work).end(run_id, reason))

    def close(self) -> None:
        """Do nothing: there is no background work."""


_LOST = (
    f"lost: no report for {LOST_S / 60:.0f} minutes; its process was killed or has no connection. "
    "If its directory has more reports, send them with `zerolab sync`"
)
