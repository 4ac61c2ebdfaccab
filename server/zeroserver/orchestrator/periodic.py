"""Periodic work: deadlines, lost agents, queue timeouts and scheduling."""

from sqlalchemy import ColumnElement, and_, exists, or_, select, text, update

from zeroserver.orchestrator.cluster.agent_service import AgentService
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS
from zeroserver.orchestrator.experiment_service import ExperimentService
from zeroserver.orchestrator.node_service import failed_before_its_kill
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import ExperimentState
from zeroserver.store.rows import ExperimentRow, RunRow, read_rows
from zeroserver.store.schema import WAITING, experiments, runs, trials

__all__ = ["PeriodicService"]

_KILLED_AT_ONCE = 64
"""Late runs that one tick kills; the next one kills the others."""
_ENDED_AT_ONCE = 16
"""Experiments with too long a wait that one tick ends."""


class PeriodicService(Service):
    """Does the periodic work of the clock."""

    experiments = Uses(ExperimentService)
    runs = Uses(RunService)
    operations = Uses(OperationService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)
    agents = Uses(AgentService)

    def tick(self) -> None:
        """Enforce deadlines, lose dead agents, schedule, and apply queue timeouts.

        Call it again while ``orchestrator.queue.unfinished``.
        """
        self.work.orchestrator.queue.unfinished = False
        for experiment_id, reason in self.searches.take_lost().items():
            self.experiments.fail(experiment_id, reason)
        self.agents.lose_silent()
        self._kill_late_runs()
        self.scheduling.schedule()
        if self._end_long_waits():  # slots may have been kept for one of them
            self.scheduling.schedule()

    def execute_operations(self) -> None:
        """Execute some queued operations of searchers, and start the trials that they queue."""
        if self.operations.execute_backlog():
            self.scheduling.schedule()

    def apply_states(self) -> None:
        """Apply an experiment's state to some of the trials that still have to follow it."""
        for experiment_id in sorted(self.work.orchestrator.queue.unapplied)[:1]:
            self.experiments.apply_state(experiment_id)

    def bound_deadlines(self) -> None:
        """Limit stored deadlines, since the clock may have been set back.

        Deadlines are kept in the time of the server that set them; ours may have begun before it.
        """
        now = self.work.steady()
        latest = now + self.work.settings.timings.backoff_most_s
        waiting = update(trials).where(trials.c.restart_at > latest)
        self.work.connection.execute(waiting.values(restart_at=latest))
        waiting_long = update(experiments).where(experiments.c.waits_since > now)
        self.work.connection.execute(waiting_long.values(waits_since=now))
        leaving = select(runs.c.id, runs.c.experiment_id, runs.c.deadline_at).where(
            runs.c.state.in_(OPEN_RUNS), runs.c.deadline_at.is_not(None)
        )
        for run_id, experiment_id, deadline in self.work.connection.execute(leaving).all():
            patience = self.work.config(experiment_id).preemption_timeout
            self.work.save(runs, run_id, deadline_at=min(deadline, now + patience))

    def _kill_late_runs(self) -> None:
        """Kill runs that have not stopped by their deadline."""
        now = self.work.steady()
        query = select(runs).where(
            runs.c.state.in_(OPEN_RUNS), runs.c.killed == 0, runs.c.deadline_at < now
        )
        late = read_rows(self.work.connection, RunRow, query.limit(_KILLED_AT_ONCE))
        if len(late) == _KILLED_AT_ONCE:
            self.work.orchestrator.queue.unfinished = True
        for run in late:
            problem = "stopped within its preemption_timeout"
            if failed_before_its_kill(self.work.connection, run):
                problem = "ended after others of its ranks have failed"
            text = f"run {run.id} has not {problem} and is killed"
            self.work.log_line(run, text, "WARNING")
            self.runs.kill(run.id)

    def _end_long_waits(self) -> bool:
        """End experiments whose trials have waited too long for slots.

        The wait begins when a trial is queued and none of the experiment's holds slots. A pause is
        no wait, nor is the moment before a trial that failed is started again.

        Returns:
            Whether one has ended. Why it waited is what the last round of the scheduler has found.
        """
        ended = 0
        now = self.work.steady()
        limited = select(experiments).where(
            experiments.c.queue_time.is_not(None),
            experiments.c.state.in_([ExperimentState.ACTIVE, ExperimentState.PAUSED]),
        )
        rows = self.work.connection.execute(limited.add_columns(_waits(now).label("waits")))
        for *columns, waits in rows.all():
            row = ExperimentRow(*columns)
            since = row.waits_since
            if not waits:
                if since is not None:
                    self.work.save(experiments, row.id, waits_since=None)
            elif since is None:
                self.work.save(experiments, row.id, waits_since=now)
            elif row.queue_time is not None and now - since > row.queue_time:
                if ended == _ENDED_AT_ONCE:
                    self.work.orchestrator.queue.unfinished = True
                    break
                self._end_wait(row)
                ended += 1
        return ended > 0

    def _end_wait(self, experiment: ExperimentRow) -> None:
        limit = experiment.queue_time
        error = f"it has waited for slots for more than {limit} s (resources.queue_time)"
        reason = self.work.orchestrator.queue.waiting.of_job(experiment.id, experiment.state)
        error = f"{error}: {reason}" if reason else error
        self.experiments.fail(experiment.id, error)


def _waits(now: float) -> ColumnElement[bool]:
    due = or_(trials.c.restart_at.is_(None), trials.c.restart_at <= now)
    queued = exists().where(
        trials.c.experiment_id == experiments.c.id,
        text(WAITING),
        due,
    )
    holding = exists().where(runs.c.experiment_id == experiments.c.id, runs.c.state.in_(OPEN_RUNS))
    return and_(queued, ~holding)
