"""Assignment of queued trials to free slots."""

from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import func, select

from zerolab import scheduler
from zerolab.contract.messages import Extension
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, RunSpec
from zerolab.scheduler import (
    Allocation,
    Decision,
    RecentUsage,
    Request,
    Start,
    held_by_account,
)
from zeroserver.orchestrator.caches import QueueCache
from zeroserver.orchestrator.cluster.scheduler_input import SchedulerInput
from zeroserver.orchestrator.cluster.wait_reasons import Waiting, changed_reasons
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import TrialState
from zeroserver.store.points import FORGOTTEN
from zeroserver.store.rows import RunRow, TrialRow
from zeroserver.store.schema import runs, trials

__all__ = ["SchedulingService"]

_STARTS_AT_ONCE = 128
"""Maximum number of runs that one round starts; the next tick starts more."""
_PREEMPTED_AT_ONCE = 200
"""Maximum number of runs that one round preempts; the next tick preempts more."""
_MOST_RESTARTING = 1000
_ANY_RESTARTING = "SELECT 1 FROM trials WHERE restart_at > ? LIMIT 1"


class SchedulingService(Service):
    """Starts, extends and preempts runs."""

    operations = Uses(OperationService)
    runs = Uses(RunService)
    searches = Uses(SearchService)
    scheduler_input = Uses(SchedulerInput)
    warm_starts = Uses(WarmStartService)

    @property
    def cache(self) -> QueueCache:
        """Queue entries that outlive the unit of work."""
        return self.work.orchestrator.queue

    def schedule(self) -> None:
        """Assign free slots to queued trials and preempt runs of lower priority."""
        waiting = self.scheduler_input.read_queue()
        usage = self.scheduler_input.recent_usage()
        restarting = self._restarting() | self.warm_starts.waiting_for_weights()
        allocations = self.scheduler_input.held_by_run()
        running = {run.job.job_id for run in allocations.values()}
        decision = Decision()
        if waiting:
            cluster = self.scheduler_input.read_cluster(allocations.values())
            decision = scheduler.schedule(cluster, waiting, list(allocations.values()))
            may_start_more = self._start(decision, waiting)
            homes = (allocations[run_id].job.job_id for run_id in decision.preempt)
            most = self.work.orchestrator.configs.affordable(homes, _PREEMPTED_AT_ONCE)
            for run_id in decision.preempt[:most]:
                self.runs.direct(run_id, "preempt")
            if len(decision.preempt) > most:
                self.cache.unfinished = True
            if may_start_more and cluster.quotas:
                # A job that had a part of a quota reserved may now wait for another quota, which
                # frees its reservation for others.
                self.schedule()
                return
            running.update(start.request.job.job_id for start in decision.start)
        started = [Allocation(0, start.request.job, start.slots) for start in decision.start]
        self._keep_usage(replace(usage, held=held_by_account([*allocations.values(), *started])))
        unserved = self.searches.unserved()
        now = Waiting.after(decision, waiting, running, restarting, unserved)
        self._keep_reasons(now)

    def extend(self, run_id: int, until: int) -> Extension:
        """Return whether a run at its bound may continue without releasing its slots.

        It may if the searcher has extended its trial and the scheduler would assign the same slots
        to it again at once. The request changes no state.

        Args:
            run_id: Run that has reached its bound.
            until: Its bound.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
        """
        run, trial = self.runs.current(run_id)
        new_bound = None if trial.waits else trial.until
        leaves = run.directive != "train" or bool(run.killed)
        if new_bound is None or new_bound <= until or leaves or not self._goes_first(run, trial):
            return Extension(goes_on=False)
        full_length = self.work.config(trial.experiment_id).searcher.length
        text = (
            f"run {run_id} continues immediately: the searcher promoted trial {trial.id} go further"
        )
        self.work.log_line(run, text)
        return Extension(goes_on=True, until=new_bound if new_bound < full_length else None)

    def _goes_first(self, run: RunRow, trial: TrialRow) -> bool:
        """Check whether a trial would get its slots back at once."""
        allocations = self.scheduler_input.held_by_run()
        allocation = allocations[run.id]
        cluster = self.scheduler_input.read_cluster(allocations.values(), allocation)
        excluded = _excluded(trial)
        free_slots = {
            agent.agent_id: set(agent.slots) for agent in cluster.agents if not agent.closed
        }
        for agent_id, slots in allocation.slots.items():
            if agent_id in excluded or not free_slots.get(agent_id, set()).issuperset(slots):
                return False
        return self.slots_after_restart(run, trial) > 0

    def slots_after_restart(self, run: RunRow, trial: TrialRow) -> int:
        """Return how many slots a trial would get if its run released its slots.

        Args:
            run: Run that holds slots.
            trial: Trial of the run.
        """
        allocations = self.scheduler_input.held_by_run()
        cluster = self.scheduler_input.read_cluster(allocations.values(), allocations[run.id])
        allocation = allocations.pop(run.id)
        request = Request(trial.id, allocation.job, 1, _excluded(trial))
        waiting = [request, *self.scheduler_input.read_queue()]
        decision = scheduler.schedule(cluster, waiting, list(allocations.values()))
        restart = next((start for start in decision.start if start.request is request), None)
        return 0 if restart is None else sum(map(len, restart.slots.values()))

    def _start(self, decision: Decision, waiting: list[Request]) -> bool:
        """Start the first trials of each request; its next trial takes over the wait reason.

        Returns:
            Whether another round in this transaction may start more trials.
        """
        homes = (start.request.job.job_id for start in decision.start)
        most = self.work.orchestrator.configs.affordable(homes, _STARTS_AT_ONCE)
        if len(decision.start) > most:
            del decision.start[most:]
            self.cache.unfinished = True
        self.cache.point_budget = FORGOTTEN
        complete = len(decision.start) > 0 and not self.cache.unfinished
        starts: dict[int, list[Start]] = {}
        for start in decision.start:
            starts.setdefault(start.request.trial_id, []).append(start)
        for group in starts.values():
            request = group[0].request
            ids = self.scheduler_input.next_trials(request, len(group) + 1)
            for trial_id, start in zip(ids, group, strict=False):
                if not self._assign(trial_id, start):
                    self.cache.unfinished = True
                    complete = False
            if request.trial_id in decision.waiting:
                waiting.append(request._replace(trial_id=ids[-1]))
                decision.waiting[ids[-1]] = decision.waiting.pop(request.trial_id)
        return complete

    def _assign(self, trial_id: int, start: Start) -> bool:
        """Start a trial, or end one that cannot start; return False to retry in the next tick."""
        trial = self.work.find(TrialRow, trial_id)
        problem = self.warm_starts.source_problem(trial)
        if problem is not None:
            self.operations.end_trial(trial, TrialState.ERROR, error=problem)
            return True
        run_id = self.runs.assign(trial, start.slots)
        if run_id is None:
            return False
        if start.before is not None and start.before != trial.experiment_id:
            text = (
                f"run {run_id} starts before experiment {start.before}, "
                "which waits and is not delayed by it"
            )
            self.work.log(trial.experiment_id, trial_id, run_id, text, "INFO")
        return True

    def _restarting(self) -> dict[int, tuple[int, str]]:
        """Return the trials in a restart delay, with their experiment and the reason."""
        if not self.work.raw(_ANY_RESTARTING, (self.work.steady(),)):
            return {}
        of_trial = select(func.max(runs.c.id)).where(runs.c.trial_id == trials.c.id)
        last = of_trial.correlate(trials).scalar_subquery()
        query = (
            select(
                trials.c.id,
                trials.c.experiment_id,
                trials.c.restarts,
                runs.c.exit_code,
                runs.c.reason,
            )
            .outerjoin(runs, runs.c.id == last)
            .where(
                trials.c.state == TrialState.QUEUED,
                trials.c.run_id.is_(None),
                trials.c.restart_at > self.work.steady(),
            )
        )
        rows = self.work.connection.execute(query.limit(_MOST_RESTARTING))
        return {row.id: (row.experiment_id, _why_again(row)) for row in rows}

    def _keep_reasons(self, now: Waiting) -> None:
        """Replace the cached wait reasons and publish the changes."""
        before = self.cache.waiting
        if before == now:
            return
        changed, experiment_ids = changed_reasons(before, now)
        for trial_id, experiment_id in changed.items():
            self.work.touch("trial", experiment_id, trial_id)
        for experiment_id in experiment_ids:
            self.work.touch("experiment", experiment_id, experiment_id)
        self.cache.waiting = now
        self.work.undo.append(lambda: setattr(self.cache, "waiting", before))

    def _keep_usage(self, usage: RecentUsage) -> None:
        """Replace the cached usage by user."""
        before = self.cache.usage
        self.cache.usage = usage
        self.work.undo.append(lambda: setattr(self.cache, "usage", before))

    def grow(self, run_id: int, steps: int) -> None:
        """Preempt a run that has saved a checkpoint if its trial could get more slots.

        Args:
            run_id: The run.
            steps: Number of batches of the checkpoint.
        """
        run = self.work.find(RunRow, run_id)
        if run.directive != "train" or run.killed or run.started_at is None:
            return
        experiment_id = run.experiment_id
        if not self.scheduler_input.jobs_of([experiment_id])[experiment_id].fewer:
            return
        allocation = self.scheduler_input.held_by_run()[run_id]
        slots_now = sum(map(len, allocation.slots.values()))
        duration = self.work.clock() - run.started_at
        if slots_now >= allocation.job.slots or duration < self._pause(run.trial_id):
            return
        length = msgspec.json.decode(run.spec, type=RunSpec).max_batches
        if length is not None and steps >= length:
            return
        free = self.slots_after_restart(run, self.work.trial_of(run))
        if free <= slots_now:
            return
        self.work.save(runs, run_id, grows_to=free)
        self.runs.direct(run_id, "preempt")
        share = f"{slots_now} of the {allocation.job.slots} slots of its trial"
        status = f"{share}, and {free} are free for it"
        text = f"run {run_id} has {status}: it saves a checkpoint and exits, and the trial restarts"
        self.work.log_line(run, f"{text} with {free}, not counted as a restart")

    def _pause(self, trial_id: int) -> float:
        """Return the minimum duration of a run, in seconds, before its trial may grow."""
        query = select(func.count()).where(
            runs.c.trial_id == trial_id, runs.c.grows_to.is_not(None)
        )
        growths = int(self.work.connection.execute(query).scalar_one())
        timings = self.work.settings.timings
        return min(timings.grow_first_s * 2.0 ** min(growths, 32), timings.grow_most_s)


def _excluded(trial: TrialRow) -> frozenset[int]:
    return frozenset(msgspec.json.decode(trial.excluded, type=list[int]))


def _why_again(row: Any) -> str:
    if row.exit_code == EXIT_INFRASTRUCTURE:
        return f"it starts again within a minute, for its last run was lost: {row.reason or '?'}"
    return f"it has failed and is started again within a minute (restart {row.restarts})"
