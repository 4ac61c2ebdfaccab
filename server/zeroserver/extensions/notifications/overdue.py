"""Scan for experiments that wait for slots, and runs that report nothing, for too long."""

import math
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from sqlalchemy import Connection, func, select

from zerolab.errors import NotFoundError
from zerolab.formatting import duration_text
from zeroserver.extensions.notifications.service import NotificationService, NotificationState
from zeroserver.orchestrator.periodic import waits_for_slots
from zeroserver.orchestrator.service import DomainEvent, DomainTransaction
from zeroserver.services import Services
from zeroserver.states import ExperimentState, RunState
from zeroserver.store.schema import experiments, notification_channels, runs

__all__ = ["OverdueScan"]

_AT_ONCE = 50
"""Maximum number of experiments or messages of one transaction."""


class _Subject(NamedTuple):
    """Experiment that waits, or run that trains, until its progress changes."""

    event: Literal["waiting", "stalled"]
    experiment_id: int
    trial_id: int | None
    number: int
    """Id of the run, or of the experiment."""
    progress: int
    """Last report of the run, or last run of the experiment."""


class OverdueScan:
    """Memory of what waits or reports nothing since when.

    It begins again with the server; a message that was stored before is not repeated.

    Args:
        services: Services of the server.
        state: Memory of the extension.
    """

    def __init__(self, services: Services, state: NotificationState) -> None:
        self.services = services
        self.state = state
        self._since: dict[_Subject, float] = {}
        self._done: set[_Subject] = set()
        self._limits: dict[int, dict[str, float]] = {}
        """Experiment to the seconds after which each event is due."""

    async def scan(self) -> None:
        """Store messages about what is overdue."""
        now = self.services.orchestrator.steady()
        seen = await self.services.read(lambda connection: _subjects(connection, now))
        self._since = {subject: self._since.get(subject, now) for subject in seen}
        self._done.intersection_update(seen)
        present = {subject.experiment_id for subject in seen}
        self._limits = {key: self._limits[key] for key in present & self._limits.keys()}
        unknown = sorted(present - self._limits.keys())
        for start in range(0, len(unknown), _AT_ONCE):
            some = unknown[start : start + _AT_ONCE]
            self._limits |= await self.services.write(partial(_limits, experiment_ids=some))
        overdue = [
            (subject, now - since)
            for subject, since in self._since.items()
            if subject not in self._done and now - since >= self._limit(subject)
        ]
        for start in range(0, len(overdue), _AT_ONCE):
            part = overdue[start : start + _AT_ONCE]
            await self.services.write(partial(self._record, overdue=part))
            self._done.update(subject for subject, _ in part)

    def _limit(self, subject: _Subject) -> float:
        limits = self._limits.get(subject.experiment_id)  # None if it was deleted meanwhile
        return math.inf if limits is None else limits[subject.event]

    def _record(self, work: DomainTransaction, overdue: list[tuple[_Subject, float]]) -> None:
        service = NotificationService(work, self.state)
        for subject, seconds in overdue:
            name, experiment_id, trial_id, number, progress = subject
            key = f"{name}:{number}:{progress}"
            if name == "waiting":
                reason = work.orchestrator.queue.waiting.of_job(experiment_id, "ACTIVE")
                text = f"no slots for {duration_text(seconds)}" + (f": {reason}" if reason else "")
                event = DomainEvent("waiting", experiment_id, text=text)
            else:
                text = f"run {number} has reported nothing for {duration_text(seconds)}"
                event = DomainEvent("stalled", experiment_id, trial_id, text)
            with suppress(NotFoundError):  # it was deleted meanwhile
                service.record(name, event, key)


def _subjects(connection: Connection, now: float) -> list[_Subject]:
    """Return the experiments that wait and the runs that have reported; none without channels."""
    if connection.scalar(select(notification_channels.c.id).limit(1)) is None:
        return []
    last_run = select(func.coalesce(func.max(runs.c.id), 0)).where(
        runs.c.experiment_id == experiments.c.id
    )
    waiting = select(experiments.c.id, last_run.scalar_subquery()).where(
        experiments.c.state == ExperimentState.ACTIVE, waits_for_slots(now)
    )
    # A command may never report: without a first report its silence means nothing.
    training = select(runs.c.id, runs.c.experiment_id, runs.c.trial_id, runs.c.last_seq).where(
        runs.c.state == RunState.RUNNING, runs.c.last_seq > 0
    )
    return [
        *(_Subject("waiting", key, None, key, last) for key, last in connection.execute(waiting)),
        *(
            _Subject("stalled", experiment_id, trial_id, run_id, last)
            for run_id, experiment_id, trial_id, last in connection.execute(training)
        ),
    ]


def _limits(work: DomainTransaction, experiment_ids: list[int]) -> dict[int, dict[str, float]]:
    limits: dict[int, dict[str, float]] = {}
    for experiment_id in experiment_ids:
        with suppress(NotFoundError):
            notify = work.config(experiment_id).notify
            limits[experiment_id] = {
                "waiting": notify.waiting_after,
                "stalled": notify.stalled_after,
            }
    return limits
