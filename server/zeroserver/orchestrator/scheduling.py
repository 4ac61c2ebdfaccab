"""Who runs where: queued trials to free slots, and what the clock brings about."""

import msgspec
from sqlalchemy import RowMapping, func, select, update

from zerolab import scheduler
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from zerolab.contract.wire import RunExit
from zerolab.scheduler import AgentSlots, Allocation, Decision, Request
from zeroserver.orchestrator.desk import World, find, log_line, save, touch
from zeroserver.orchestrator.runs import assign, exited
from zeroserver.orchestrator.trials import direct_run, kill_run
from zeroserver.orchestrator.waiting import Waiting, changed_reasons
from zeroserver.states import ExperimentState, RunState, TrialState
from zeroserver.store.database import Transaction
from zeroserver.store.schema import agents, experiments, runs, trials

__all__ = ["bound_deadlines", "schedule", "tick"]


def schedule(world: World, transaction: Transaction) -> None:
    """Give free slots to the trials that wait; ask runs to leave for those that go first."""
    waiting = _waiting(world, transaction)
    restarting = _restarting(world, transaction)
    if not waiting:
        _keep_reasons(world, transaction, Waiting.after(Decision(), [], set(), restarting))
        return
    held = _held(transaction)
    decision = scheduler.schedule(_living(transaction), waiting, list(held.values()))
    for allocation in decision.start:
        trial = find(transaction, trials, allocation.request.trial_id)
        (agent_id, slot_ids), *_ = allocation.slots.items()
        assign(world, transaction, trial, agent_id, list(slot_ids))
    if decision.preempt:
        by_trial = {each.request.trial_id: run_id for run_id, each in held.items()}
        for trial_id in decision.preempt:
            direct_run(world, transaction, by_trial[trial_id], "preempt")
    running = {each.request.experiment_id for each in [*held.values(), *decision.start]}
    _keep_reasons(world, transaction, Waiting.after(decision, waiting, running, restarting))


def _restarting(world: World, transaction: Transaction) -> dict[int, tuple[int, str]]:
    """Return the trials that failed a moment ago, with their experiment and the reason."""
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
            trials.c.restart_at > world.steady(),
        )
    )
    found = transaction.connection.execute(query.limit(_MOST_RESTARTING)).mappings()
    return {row["id"]: (row["experiment_id"], _why_again(row)) for row in found}


def _why_again(row: RowMapping) -> str:
    if row["exit_code"] == EXIT_INFRASTRUCTURE:
        return f"it starts again in a moment, for its last run was lost: {row['reason'] or '?'}"
    return f"it has failed and is started again in a moment (restart {row['restarts']})"


def _keep_reasons(world: World, transaction: Transaction, now: Waiting) -> None:
    """Put new reasons in the place of the old ones, and tell those who watch."""
    before = world.waiting
    if before == now:
        return
    changed, told = changed_reasons(before, now)
    for trial_id, experiment_id in changed.items():
        touch(transaction, "trial", experiment_id, trial_id)
    for experiment_id in told:
        touch(transaction, "experiment", experiment_id, experiment_id)
    world.waiting = now
    transaction.undo.append(lambda: setattr(world, "waiting", before))


def _living(transaction: Transaction) -> list[AgentSlots]:
    query = select(agents.c.id, agents.c.slots).where(agents.c.alive == 1)
    found = []
    for agent_id, text in transaction.connection.execute(query):
        slots = msgspec.json.decode(text)
        cuda = any(str(slot["device"]).startswith("cuda") for slot in slots)
        ids = tuple(int(slot["id"]) for slot in slots)
        found.append(AgentSlots(agent_id, ids, "cuda" if cuda else "cpu"))
    return found


_MOST_RESTARTING = 1000
_NEXT_TRIALS = 64
"""Trials of one experiment that are looked at in one round; its others come in the next."""

_REQUEST = (
    trials.c.id,
    trials.c.experiment_id,
    trials.c.excluded,
    experiments.c.slots,
    experiments.c.max_slots,
    experiments.c.priority,
    experiments.c.weight,
)


def _request(row: RowMapping) -> Request:
    return Request(
        trial_id=row["id"],
        experiment_id=row["experiment_id"],
        slots=row["slots"],
        order=row["id"],
        priority=row["priority"],
        weight=row["weight"],
        max_slots=row["max_slots"],
        single_agent=True,  # an agent starts all ranks of a run
        excluded=frozenset(msgspec.json.decode(row["excluded"])),
    )


def _waiting(world: World, transaction: Transaction) -> list[Request]:
    turn = func.row_number().over(partition_by=trials.c.experiment_id, order_by=trials.c.id)
    found = (
        select(*_REQUEST, turn.label("turn"))
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(
            trials.c.state == TrialState.QUEUED,
            trials.c.run_id.is_(None),
            experiments.c.state == ExperimentState.ACTIVE,
            (trials.c.restart_at.is_(None)) | (trials.c.restart_at <= world.steady()),
        )
        .subquery()
    )
    query = select(found).where(found.c.turn <= _NEXT_TRIALS)
    return [_request(row) for row in transaction.connection.execute(query).mappings()]


def _held(transaction: Transaction) -> dict[int, Allocation]:
    """Return what every run holds."""
    query = (
        select(
            runs.c.id.label("run_id"),
            runs.c.agent_id,
            runs.c.slot_ids,
            runs.c.directive,
            runs.c.killed,
            *_REQUEST,
        )
        .join(trials, trials.c.id == runs.c.trial_id)
        .join(experiments, experiments.c.id == runs.c.experiment_id)
        .where(runs.c.state != RunState.EXITED)
        .order_by(runs.c.id)
    )
    return {
        row["run_id"]: Allocation(
            _request(row),
            {row["agent_id"]: tuple(msgspec.json.decode(row["slot_ids"]))},
            stopping=row["directive"] != "train" or bool(row["killed"]),
        )
        for row in transaction.connection.execute(query).mappings()
    }


def tick(world: World, transaction: Transaction) -> None:
    """Look after deadlines, dead agents and waits that are over; then schedule."""
    _lose_silent_agents(world, transaction)
    _kill_late_runs(world, transaction)
    schedule(world, transaction)


def bound_deadlines(world: World, transaction: Transaction) -> None:
    """Let nothing wait longer than it can have to: the clock may have been set back meanwhile.

    Deadlines are kept in the time of the server that set them; ours may have begun before it.
    """
    now = world.steady()
    latest = now + world.settings.timings.backoff_most_s
    waiting = update(trials).where(trials.c.restart_at > latest)
    transaction.connection.execute(waiting.values(restart_at=latest))
    leaving = select(runs.c.id, runs.c.experiment_id, runs.c.deadline_at).where(
        runs.c.state != RunState.EXITED, runs.c.deadline_at.is_not(None)
    )
    for run_id, experiment_id, deadline in transaction.connection.execute(leaving).all():
        patience = world.config(transaction, experiment_id).preemption_timeout
        save(transaction, runs, run_id, deadline_at=min(deadline, now + patience))


def _lose_silent_agents(world: World, transaction: Transaction) -> None:
    patience = world.settings.timings.agent_dead_s
    living = transaction.connection.execute(
        select(agents.c.id, agents.c.name).where(agents.c.alive == 1)
    ).all()
    for agent_id, name in living:
        if world.silence_s(agent_id) <= patience:
            continue
        save(transaction, agents, agent_id, alive=0)
        query = select(runs).where(runs.c.agent_id == agent_id, runs.c.state != RunState.EXITED)
        for run in transaction.connection.execute(query).mappings().all():
            reason = f"agent {name} has not been heard of for {patience:g} s"
            # A run that never began is no failure of its trial.
            code = EXIT_PREEMPTED if run["state"] == RunState.ASSIGNED else EXIT_INFRASTRUCTURE
            exited(world, transaction, run["id"], RunExit(code, reason))


def _kill_late_runs(world: World, transaction: Transaction) -> None:
    """Kill runs that have not left by their deadline, and give up on those that cannot be."""
    now = world.steady()
    late = transaction.connection.execute(
        select(runs).where(
            runs.c.state != RunState.EXITED, runs.c.killed == 0, runs.c.deadline_at < now
        )
    )
    for run in late.mappings().all():
        text = f"run {run['id']} has not stopped within its preemption_timeout and is killed"
        log_line(world, transaction, run, text, "WARNING")
        kill_run(world, transaction, run["id"])
