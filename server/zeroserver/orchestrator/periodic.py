"""Periodic work: deadlines, lost agents, queue timeouts and scheduling."""

from sqlalchemy import ColumnElement, and_, exists, or_, select, text, update

from zerolab.searcher import Deferred
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

__all__ = ["PeriodicService", "waits_for_slots"]

_KILLED_AT_ONCE = 64
"""Maximum number of overdue runs that one tick kills; the next tick kills more."""
_ENDED_AT_ONCE = 16
"""Maximum number of experiments that one tick ends because of their queue time."""


class PeriodicService(Service):
    """Performs the server's periodic work."""

    experiments = Uses(ExperimentService)
    runs = Uses(RunService)
    operations = Uses(OperationService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)
    agents = Uses(AgentService)

    def tick(self) -> None:
        """Mark dead agents as lost, enforce deadlines and queue timeouts, and schedule.

        Call it again while ``orchestrator.queue.unfinished`` is set.
        """
        # Everything that queues trials or frees slots comes first, so that the schedule of the same
        # tick uses it. Queue times are checked after it: a trial that starts now waits no longer.
        self.work.orchestrator.queue.unfinished = False
        for experiment_id, reason in self.searches.take_lost().items():
            self.experiments.fail(experiment_id, reason)
        self.agents.lose_silent()
        self._kill_late_runs()
        self.scheduling.schedule()
        if self._end_long_waits():  # slots may have been reserved for one of them
            self.scheduling.schedule()

    def execute_operations(self) -> bool:
        """Execute some backlogged operations of searchers and schedule the resulting trials.

        Returns:
            Whether there were any.
        """
        if not self.operations.execute_backlog():
            return False
        self.scheduling.schedule()
        return True

    def execute_deferred(self, experiment_id: int, deferred: Deferred) -> None:
        """Execute computed operations of a searcher and schedule the resulting trials."""
        self.operations.execute_deferred(experiment_id, deferred)
        self.scheduling.schedule()

    def apply_states(self) -> None:
        """Apply the state of one experiment to some of its remaining trials."""
        for experiment_id in sorted(self.work.orchestrator.queue.unapplied)[:1]:
            self.experiments.apply_state(experiment_id)

    def bound_deadlines(self) -> None:
        """Limit stored deadlines, since the wall clock may have been set back.

        Deadlines are in the steady time of the server that stored them. The steady clock of this
        server may have started at an earlier wall-clock time.
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
            timeout = self.work.config(experiment_id).preemption_timeout
            self.work.save(runs, run_id, deadline_at=min(deadline, now + timeout))

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

        The wait begins when a trial is queued and no trial of the experiment holds slots. Pauses
        and restart delays do not count.

        Returns:
            Whether an experiment was ended.
        """
        ended = 0
        now = self.work.steady()
        limited = select(experiments).where(
            experiments.c.queue_time.is_not(None),
            experiments.c.state.in_([ExperimentState.ACTIVE, ExperimentState.PAUSED]),
        )
        rows = self.work.connection.execute(
            limited.add_columns(waits_for_slots(now).label("waits"))
        )
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


def waits_for_slots(now: float) -> ColumnElement[bool]:
    """Return the condition for experiments with queued trials of which none holds slots.

    Args:
        now: Time of the steady clock; a trial that restarts later does not wait.
    """
    due = or_(trials.c.restart_at.is_(None), trials.c.restart_at <= now)
    queued = exists().where(
        trials.c.experiment_id == experiments.c.id,
        text(WAITING),
        due,
    )
    holding = exists().where(runs.c.experiment_id == experiments.c.id, runs.c.state.in_(OPEN_RUNS))
    return and_(queued, ~holding)
