"""Assignment of queued trials to free slots, and periodic work of the clock."""

import msgspec
from sqlalchemy import RowMapping, func, select, update

from zerolab import scheduler
from zerolab.contract.messages import Extension
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zerolab.scheduler import Decision, Request, Start
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.cluster.agents import lose_silent
from zeroserver.orchestrator.cluster.queue_timeout import end_long_waits
from zeroserver.orchestrator.cluster.scheduler_input import (
    OPEN_RUNS,
    held_by_run,
    next_trials,
    read_cluster,
    read_queue,
)
from zeroserver.orchestrator.nodes import failed_before_its_kill
from zeroserver.orchestrator.runs import assign, current_run
from zeroserver.orchestrator.state import Fields
from zeroserver.orchestrator.trials import direct_run, end_trial, fail_experiment, kill_run
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.wait_reasons import Waiting, changed_reasons
from zeroserver.orchestrator.warm_start import source_problem, waiting_for_weights
from zeroserver.states import TrialState
from zeroserver.store.points import FORGOTTEN
from zeroserver.store.schema import experiments, runs, trials

__all__ = ["bound_deadlines", "extend", "schedule", "slots_instead", "tick"]


def schedule(work: UnitOfWork) -> None:
    """Give free slots to the trials that wait; ask runs to leave for those that go first."""
    waiting = read_queue(work)
    restarting = _restarting(work) | waiting_for_weights(work)
    held = held_by_run(work)
    running = {run.job.job_id for run in held.values()}
    decision = Decision()
    if waiting:
        cluster = read_cluster(work, held.values())
        decision = scheduler.schedule(cluster, waiting, list(held.values()))
        went_on = _start(work, decision, waiting)
        for run_id in decision.preempt:
            direct_run(work, run_id, "preempt")
        if went_on and cluster.quotas:
            # Who waited for slots and has kept a share of a quota may by now wait for another
            # quota, and keep it no more.
            schedule(work)
            return
        running.update(start.request.job.job_id for start in decision.start)
    unserved = searching.unserved(work)
    now = Waiting.after(decision, waiting, running, restarting, unserved)
    _keep_reasons(work, now)


def extend(work: UnitOfWork, run_id: int, until: int) -> Extension:
    """Say whether a run that has come to its bound goes on, rather than leave and start again.

    It does when its trial has been let go further meanwhile, and would be given slots again at
    once: nobody goes first. Nothing is changed by the answer.

    Args:
        work: Unit of work.
        run_id: A run that trains.
        until: Its bound.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If it has ended, or another run has taken over.
    """
    run, trial = current_run(work, run_id)
    further = trial["until"] is not None and trial["until"] > until and not trial["waits"]
    asked_to_leave = run["directive"] != "train" or bool(run["killed"])
    if not further or asked_to_leave or not _goes_first(work, run, trial):
        return Extension(goes_on=False)
    whole = work.config(trial["experiment_id"]).searcher.length
    text = f"run {run_id} goes on at once: the searcher lets trial {trial['id']} go further"
    work.log_line(run, text)
    return Extension(goes_on=True, until=trial["until"] if trial["until"] < whole else None)


def _goes_first(work: UnitOfWork, run: Fields, trial: Fields) -> bool:
    """Whether a trial would be given slots at once, and may stay on all that its run holds."""
    held = held_by_run(work)
    mine = held[run["id"]]
    cluster = read_cluster(work, held.values(), mine)
    excluded = _excluded(trial)
    free = {one.agent_id: set(one.slots) for one in cluster.agents if not one.closed}
    for agent_id, slots in mine.slots.items():
        if agent_id in excluded or not free.get(agent_id, set()).issuperset(slots):
            return False
    return slots_instead(work, run, trial) > 0


def slots_instead(work: UnitOfWork, run: Fields, trial: Fields) -> int:
    """How many slots a trial would be given at once, if its run gave back all that it holds.

    Args:
        work: Unit of work.
        run: A run that holds slots.
        trial: Its trial.
    """
    held = held_by_run(work)
    cluster = read_cluster(work, held.values(), held[run["id"]])
    mine = held.pop(run["id"])
    again = Request(trial["id"], mine.job, 1, _excluded(trial))
    waiting = [again, *read_queue(work)]
    decision = scheduler.schedule(cluster, waiting, list(held.values()))
    found = next((one for one in decision.start if one.request is again), None)
    return 0 if found is None else sum(map(len, found.slots.values()))


def _excluded(trial: Fields) -> frozenset[int]:
    return frozenset(msgspec.json.decode(trial["excluded"], type=list[int]))


_STARTS_AT_ONCE = 128
"""Runs that one round starts; the next tick starts the others."""


def _start(work: UnitOfWork, decision: Decision, waiting: list[Request]) -> bool:
    """Start the first trials of each request, and name the next one as the one that waits.

    Returns:
        Whether another round may start more in the same change.
    """
    if len(decision.start) > _STARTS_AT_ONCE:
        del decision.start[_STARTS_AT_ONCE:]
        work.orchestrator.unfinished = True
    work.orchestrator.forgettable = FORGOTTEN
    complete = len(decision.start) > 0 and not work.orchestrator.unfinished
    starts: dict[int, list[Start]] = {}
    for start in decision.start:
        starts.setdefault(start.request.trial_id, []).append(start)
    for mine in starts.values():
        request = mine[0].request
        ids = next_trials(work, request, len(mine) + 1)
        for trial_id, start in zip(ids, mine, strict=False):
            if not _assign(work, trial_id, start):
                work.orchestrator.unfinished = True
                complete = False
        if request.trial_id in decision.waiting:
            waiting.append(request._replace(trial_id=ids[-1]))
            decision.waiting[ids[-1]] = decision.waiting.pop(request.trial_id)
    return complete


def _assign(work: UnitOfWork, trial_id: int, start: Start) -> bool:
    """Start a trial, or end one that cannot start; return False if it takes another change."""
    trial = work.find(trials, trial_id)
    problem = source_problem(work, trial)
    if problem is not None:
        end_trial(work, trial, TrialState.ERROR, error=problem)
        return True
    run_id = assign(work, trial, start.slots)
    if run_id is None:
        return False
    if start.before is not None and start.before != trial["experiment_id"]:
        run = {"experiment_id": trial["experiment_id"], "trial_id": trial_id, "id": run_id}
        text = f"starts before experiment {start.before}, which waits and is not delayed by it"
        work.log_line(run, f"run {run_id} {text}")
    return True


def _restarting(work: UnitOfWork) -> dict[int, tuple[int, str]]:
    """Return the trials that failed a moment ago, with their experiment and the reason."""
    if not work.raw(_ANY_RESTARTING, (work.steady(),)):
        return {}
    of_trial = select(func.max(runs.c.id)).where(runs.c.trial_id == trials.c.id)
    last = of_trial.correlate(trials).scalar_subquery()
    query = (
        select(
            trials.c.id, trials.c.experiment_id, trials.c.restarts, runs.c.exit_code, runs.c.reason
        )
        .outerjoin(runs, runs.c.id == last)
        .where(
            trials.c.state == TrialState.QUEUED,
            trials.c.run_id.is_(None),
            trials.c.restart_at > work.steady(),
        )
    )
    found = work.connection.execute(query.limit(_MOST_RESTARTING)).mappings()
    return {row["id"]: (row["experiment_id"], _why_again(row)) for row in found}


def _why_again(row: RowMapping) -> str:
    if row["exit_code"] == EXIT_INFRASTRUCTURE:
        return f"it starts again within a minute, for its last run was lost: {row['reason'] or '?'}"
    return f"it has failed and is started again within a minute (restart {row['restarts']})"


def _keep_reasons(work: UnitOfWork, now: Waiting) -> None:
    """Put new reasons in the place of the old ones, and tell those who watch."""
    before = work.orchestrator.waiting
    if before == now:
        return
    changed, told = changed_reasons(before, now)
    for trial_id, experiment_id in changed.items():
        work.touch("trial", experiment_id, trial_id)
    for experiment_id in told:
        work.touch("experiment", experiment_id, experiment_id)
    work.orchestrator.waiting = now
    work.undo.append(lambda: setattr(work.orchestrator, "waiting", before))


_MOST_RESTARTING = 1000
_ANY_RESTARTING = "SELECT 1 FROM trials WHERE restart_at > ? LIMIT 1"


def tick(work: UnitOfWork) -> None:
    """Look after deadlines and dead agents, and schedule; what then still waits may have to end.

    Call it again while ``orchestrator.unfinished``.
    """
    work.orchestrator.unfinished = False
    for experiment_id, why in searching.forget_lost(work).items():
        fail_experiment(work, experiment_id, why)
    lose_silent(work)
    _kill_late_runs(work)
    schedule(work)
    if end_long_waits(work):  # slots may have been kept for one of them
        schedule(work)


def bound_deadlines(work: UnitOfWork) -> None:
    """Let nothing wait longer than it can have to: the clock may have been set back meanwhile.

    Deadlines are kept in the time of the server that set them; ours may have begun before it.
    """
    now = work.steady()
    latest = now + work.settings.timings.backoff_most_s
    waiting = update(trials).where(trials.c.restart_at > latest)
    work.connection.execute(waiting.values(restart_at=latest))
    waiting_long = update(experiments).where(experiments.c.waits_since > now)
    work.connection.execute(waiting_long.values(waits_since=now))
    leaving = select(runs.c.id, runs.c.experiment_id, runs.c.deadline_at).where(
        runs.c.state.in_(OPEN_RUNS), runs.c.deadline_at.is_not(None)
    )
    for run_id, experiment_id, deadline in work.connection.execute(leaving).all():
        patience = work.config(experiment_id).preemption_timeout
        work.save(runs, run_id, deadline_at=min(deadline, now + patience))


def _kill_late_runs(work: UnitOfWork) -> None:
    """Kill runs that have not left by their deadline, and give up on those that cannot be."""
    now = work.steady()
    late = work.connection.execute(
        select(runs).where(
            runs.c.state.in_(OPEN_RUNS), runs.c.killed == 0, runs.c.deadline_at < now
        )
    )
    for run in late.mappings().all():
        wish = "stopped within its preemption_timeout"
        if failed_before_its_kill(work.connection, run):
            wish = "ended after others of its ranks have failed"
        text = f"run {run['id']} has not {wish} and is killed"
        work.log_line(run, text, "WARNING")
        kill_run(work, run["id"])
