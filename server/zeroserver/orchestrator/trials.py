"""State changes of trials: creation, stop and end."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, RowMapping, select, text, update

from zerolab.contract.messages import LEAVE_GRACE_S
from zerolab.contract.outcome import is_failure
from zerolab.contract.spec import Command, RunSpec
from zerolab.searcher import Continue, Create, Operation, Reopen, Shutdown, Stop
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.checkpoints.retention import (
    apply_to_experiment,
    apply_to_trial,
    discard_unfinished,
)
from zeroserver.orchestrator.experiments import move_experiment, settle_experiment
from zeroserver.orchestrator.searching import Event
from zeroserver.orchestrator.state import (
    Orchestrator,
    agents_changed,
)
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import newest_checkpoint, settle_sources, source_of_trial
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_ENDED,
    TRIAL_MOVES,
    ExperimentState,
    TrialState,
    check_move,
)
from zeroserver.store.database import Change
from zeroserver.store.schema import WEIGHTS_MISSING, experiments, runs, trials

__all__ = [
    "DELETED",
    "cancel_idle_trials",
    "carry_out",
    "carry_out_more",
    "carry_out_some",
    "direct_run",
    "drop_backlog",
    "end_trial",
    "fail_experiment",
    "interrupted_searches",
    "kill_run",
    "move_trial",
    "reopen_trial",
    "reopen_trials",
    "resting_state",
    "resume_backlog",
    "stop_trial",
    "tell_searcher",
]

DELETED = "user_canceled"
"""What a searcher is told of a trial that a user has deleted: it never comes back."""

_ASKS_AGAIN_S = 60.0
"""For runs that have asked the server before it was started anew to ask again."""
_INSERT_TRIAL = (
    "INSERT INTO trials (experiment_id, request_id, state, hparams, seed, created_at, "
    "source_checkpoint, source_trial_id, source_steps, restarts, waits, steps_completed, "
    "progress, searcher_steps, excluded, labels) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, -1, '[]', '[]')"
)
_BUDGET_MS = 60.0
"""What one change may cost; see :func:`cost_of`."""


def move_trial(work: UnitOfWork, trial: RowMapping, state: TrialState, **values: Any) -> None:
    """Change a trial's state, and other columns with it.

    Raises:
        ConflictError: If the transition is not legal.
    """
    if trial["state"] != state:
        check_move(TRIAL_MOVES, f"trial {trial['id']}", trial["state"], state)
        _count_moves(work, trial["experiment_id"], [(trial["state"], state)])
    work.save(trials, trial["id"], state=state, **values)
    work.touch("trial", trial["experiment_id"], trial["id"])
    if state in TRIAL_ENDED or state == TrialState.PAUSED:
        settle_sources(work, trial["id"])


_COUNTED = (TrialState.ERROR, TrialState.CANCELED)


def _count_moves(work: UnitOfWork, experiment_id: int, moves: Iterable[tuple[str, str]]) -> None:
    """Keep the numbers of failed and canceled trials of an experiment.

    Args:
        work: Unit of work.
        experiment_id: Whose trials move.
        moves: State before and after, of each trial.
    """
    changes = dict.fromkeys(_COUNTED, 0)
    for before, after in moves:
        for state in _COUNTED:
            changes[state] += (after == state) - (before == state)
    if any(changes.values()):
        work.run(_COUNT, (*changes.values(), experiment_id))


_COUNT = (
    "UPDATE experiments SET failed_trials = failed_trials + ?, "
    "canceled_trials = canceled_trials + ? WHERE id = ?"
)


def resting_state(experiment_state: str, trial: Mapping[str, Any] | RowMapping) -> TrialState:
    """Where a trial without a run belongs that has not ended: in the queue, unless it must wait.

    It waits while its experiment is not active, while a user has paused it, and while it stands
    where the searcher wanted it to stop and wait.
    """
    active = experiment_state == ExperimentState.ACTIVE
    waits = trial["waits"] or trial["held"]
    return TrialState.QUEUED if active and not waits else TrialState.PAUSED


def tell_searcher(work: UnitOfWork, experiment_id: int, event: Event) -> bool:
    """Tell the searcher an event and carry out what it then wants; return whether it did."""
    operations = searching.tell(work, experiment_id, event)
    carry_out(work, experiment_id, operations)
    return bool(operations)


def carry_out(work: UnitOfWork, experiment_id: int, operations: Sequence[Operation]) -> None:
    """Do what the searcher wants, and what it wants in consequence.

    No more is done than one change may cost; the rest waits in the experiment's backlog, for
    :func:`carry_out_more`. What the searcher answers to an operation that is being carried out
    is done after those that wait already.
    """
    if experiment_id in work.orchestrator.carrying_out:
        work.orchestrator.carrying_out[experiment_id].extend(operations)
        return
    backlog = work.orchestrator.backlog.get(experiment_id, ())
    now: list[Operation] = []
    later: list[Operation] = []
    waiting = {each.trial_id for each in backlog if not isinstance(each, Shutdown)}
    for each in operations:  # what follows from the backlog must come behind it
        waits = isinstance(each, Create | Shutdown) or each.trial_id in waiting
        (later if backlog and waits else now).append(each)
        if isinstance(each, Create):
            waiting.add(each.trial_id)
    rest = (*carry_out_some(work, experiment_id, now), *backlog, *later)
    _keep_backlog(work, experiment_id, rest)
    if operations and not rest and work.find(experiments, experiment_id)["searcher_done"]:
        settle_experiment(work, experiment_id)  # its last trial may have ended before


def drop_backlog(work: UnitOfWork, experiment_id: int) -> None:
    """Forget what an experiment's searcher wanted and was not carried out."""
    _keep_backlog(work, experiment_id, ())


def carry_out_more(work: UnitOfWork) -> bool:
    """Carry out a part of the oldest backlog; return whether there was one.

    Call it until it returns False; every call is a change of its own.
    """
    experiment_id = next(iter(work.orchestrator.backlog), None)
    if experiment_id is None:
        return False
    backlog = work.orchestrator.backlog[experiment_id]
    query = "SELECT state, searcher_done FROM experiments WHERE id = ?"
    found = work.raw(query, (experiment_id,))
    over = EXPERIMENT_ENDED | EXPERIMENT_STOPPING
    if not found or found[0][0] in over or found[0][1]:
        _keep_backlog(work, experiment_id, ())
        return True
    rest = carry_out_some(work, experiment_id, backlog)
    _keep_backlog(work, experiment_id, rest)
    if not rest:
        settle_experiment(work, experiment_id)
    return True


def interrupted_searches(connection: Connection) -> list[int]:
    """Return the running searches of whose operations a killed server has not carried out all."""
    query = select(experiments.c.id).where(
        experiments.c.creating == 1,
        experiments.c.searcher_name != "custom",  # its program sends the operations again
        experiments.c.state.not_in(EXPERIMENT_ENDED | EXPERIMENT_STOPPING),
    )
    return list(connection.scalars(query.order_by(experiments.c.id)))


def resume_backlog(work: UnitOfWork, experiment_id: int) -> None:
    """Put the operations of a search that a killed server has not carried out into its backlog."""
    experiment = work.find(experiments, experiment_id)
    if experiment["state"] not in EXPERIMENT_ENDED | EXPERIMENT_STOPPING:
        rest = searching.not_carried_out(work, experiment_id)
        _keep_backlog(work, experiment_id, rest)


def _keep_backlog(work: UnitOfWork, experiment_id: int, rest: Sequence[Operation]) -> None:
    before = work.orchestrator.backlog.get(experiment_id)
    if not rest and before is None:
        return
    _set_backlog(work.orchestrator, experiment_id, tuple(rest) or None)
    work.undo.append(partial(_set_backlog, work.orchestrator, experiment_id, before))
    if bool(rest) != bool(before):
        statement = "UPDATE experiments SET creating = ? WHERE id = ?"
        work.run(statement, (int(bool(rest)), experiment_id))


def _set_backlog(
    orchestrator: Orchestrator, experiment_id: int, rest: tuple[Operation, ...] | None
) -> None:
    if rest is None:
        orchestrator.backlog.pop(experiment_id, None)
    else:
        orchestrator.backlog[experiment_id] = rest


def cost_of(operation: Operation) -> float:
    """Return what carrying out an operation costs, roughly in milliseconds of the writer."""
    if isinstance(operation, Create):
        return 0.1 if operation.source is None else 1.5
    return 0.7 if isinstance(operation, Continue) else 3.0


def carry_out_some(
    work: UnitOfWork, experiment_id: int, operations: Sequence[Operation]
) -> Sequence[Operation]:
    """Carry out the first operations, as many as one change may cost; the caller settles.

    Returns:
        The remaining operations, with those that the searcher returned for the first ones.
    """
    waiting = deque(operations)
    work.orchestrator.carrying_out[experiment_id] = waiting
    try:
        _carry_out_first(work, experiment_id, waiting)
    finally:
        del work.orchestrator.carrying_out[experiment_id]
    return waiting


def _carry_out_first(work: UnitOfWork, experiment_id: int, waiting: deque[Operation]) -> None:
    """Take operations from a queue and carry them out, as many as one change may cost."""
    created, spent = 0, 0.0
    while waiting and spent < _BUDGET_MS:
        operation = waiting.popleft()
        spent += cost_of(operation)
        if isinstance(operation, Create):
            same = [operation]
            while (
                operation.source is None
                and waiting
                and isinstance(each := waiting[0], Create)
                and each.source is None
                and spent < _BUDGET_MS
            ):
                spent += cost_of(each)
                same.append(each)
                waiting.popleft()
            _create(work, experiment_id, same)
            created += len(same)
            numbers = [each.trial_id for each in same]
            waiting.extend(searching.tell_created(work, experiment_id, numbers))
        elif isinstance(operation, Shutdown):
            if any(not isinstance(each, Shutdown) for each in waiting):
                waiting.append(operation)  # the others were wanted before the end
                continue
            work.save(experiments, experiment_id, searcher_done=1)
        elif (trial := _requested(work, experiment_id, operation.trial_id)) is None:
            gone = Event("exited_early", operation.trial_id, reason=DELETED)
            waiting.extend(searching.tell(work, experiment_id, gone))
        elif isinstance(operation, Stop):
            if trial["state"] not in TRIAL_ENDED:
                stop_trial(work, trial, "searcher")
        elif isinstance(operation, Continue):
            _continue(work, trial, operation.until)
        elif isinstance(operation, Reopen):
            reopen_trial(work, trial, ExperimentState.ACTIVE, waits=1)
    experiment = work.find(experiments, experiment_id)
    values: dict[str, Any] = {"num_trials": experiment["num_trials"] + created}
    if not experiment["searcher_done"]:  # else what it was before the end stays
        done = searching.progress(work, experiment_id)
        values["progress"] = max(experiment["progress"], done)
    work.save(experiments, experiment_id, **values)
    work.touch("experiment", experiment_id, experiment_id)


def _create(work: UnitOfWork, experiment_id: int, operations: Sequence[Create]) -> None:
    """Create trials; several at once only if none of them has a source."""
    query = "SELECT state, source_checkpoint FROM experiments WHERE id = ?"
    ((experiment_state, source),) = work.raw(query, (experiment_id,))
    paused = experiment_state == ExperimentState.PAUSED
    state = TrialState.PAUSED if paused else TrialState.QUEUED
    now = work.clock()
    ((last,),) = work.raw("SELECT coalesce(max(id), 0) FROM trials")
    rows = []
    for operation in operations:
        weights = {"source_checkpoint": source}
        weights |= source_of_trial(work, experiment_id, operation)
        rows.append(
            (
                experiment_id, operation.trial_id, str(state),
                msgspec.json.encode(operation.hparams).decode(), operation.trial_seed, now,
                weights["source_checkpoint"], weights.get("source_trial_id"),
                weights.get("source_steps"),
            )
        )  # fmt: skip
    work.many(_INSERT_TRIAL, rows)
    new = "SELECT id FROM trials WHERE experiment_id = ? AND id > ? ORDER BY id"
    for (trial_id,) in work.raw(new, (experiment_id, last)):
        work.touch("trial", experiment_id, trial_id)


def _requested(work: UnitOfWork, experiment_id: int, request_id: int) -> RowMapping | None:
    """The trial that the searcher has under a number; None if a user has deleted it."""
    query = select(trials).where(
        trials.c.experiment_id == experiment_id, trials.c.request_id == request_id
    )
    return work.connection.execute(query).mappings().one_or_none()


def _continue(work: UnitOfWork, trial: RowMapping, until: int) -> None:
    work.save(trials, trial["id"], until=until, waits=0)
    experiment = work.experiment_of(trial)
    if trial["state"] == TrialState.PAUSED and trial["run_id"] is None:
        free = {**trial, "waits": 0}
        move_trial(work, trial, resting_state(experiment["state"], free))


def reopen_trial(work: UnitOfWork, trial: RowMapping, experiment_state: str, **values: Any) -> None:
    """Let a trial that has ended go on, or wait, as if it had not; with all its restarts before it.

    Args:
        work: Unit of work.
        trial: One that has ended.
        experiment_state: Of its experiment, from now on.
        values: Other columns that change.
    """
    latest = trial["latest_checkpoint"] or newest_checkpoint(work, trial["id"])
    state = resting_state(experiment_state, {**trial, "held": 0, **values})
    move_trial(
        work, trial, state, stop=None, held=0, error=None, ended_at=None, restart_at=None,
        archived=0, restarts=0, latest_checkpoint=latest, **values,
    )  # fmt: skip


def reopen_trials(
    work: UnitOfWork,
    experiment_id: int,
    ended: Sequence[RowMapping],
    state: str,
) -> None:
    """Let trials that have ended go on, as :func:`reopen_trial`: thousands at once.

    Args:
        work: Unit of work.
        experiment_id: Their experiment.
        ended: The trials.
        state: Of the experiment, from now on.
    """
    by_state: dict[TrialState, list[int]] = {}
    moves: list[tuple[str, str]] = []
    for trial in ended:
        to = resting_state(state, {"waits": trial["waits"], "held": 0})
        check_move(TRIAL_MOVES, f"trial {trial['id']}", trial["state"], to)
        by_state.setdefault(to, []).append(trial["id"])
        moves.append((trial["state"], to))
    _count_moves(work, experiment_id, moves)
    work.touch_trials(experiment_id, (trial["id"] for trial in ended))
    for to, ids in by_state.items():
        work.many(_REOPEN, [(str(to), number) for number in ids])
    waiting = select(trials.c.source_trial_id).where(text(WEIGHTS_MISSING))
    paused = set(by_state.get(TrialState.PAUSED, ()))
    for source in paused.intersection(work.connection.scalars(waiting)):
        settle_sources(work, source)


_REOPEN = (
    "UPDATE trials SET state = ?, stop = NULL, held = 0, error = NULL, ended_at = NULL, "
    "restart_at = NULL, archived = 0, restarts = 0, latest_checkpoint = coalesce("
    "latest_checkpoint, (SELECT uuid FROM checkpoints WHERE trial_id = trials.id "
    "AND state = 'COMPLETED' ORDER BY steps_completed DESC, id DESC LIMIT 1)) WHERE id = ?"
)


def stop_trial(work: UnitOfWork, trial: RowMapping, why: str) -> None:
    """End a trial: at once when no run of it is there, else when its run has checkpointed.

    Args:
        work: Unit of work.
        trial: One that has not ended.
        why: ``searcher``, ``cancel``, ``kill`` or ``error`` (its column says which); the last two
            do not wait for a checkpoint.
    """
    if trial["stop"] != "searcher" or why == "error":  # else it is through with it, come what may
        work.save(trials, trial["id"], stop=why)
    if trial["run_id"] is None:
        state = TrialState.COMPLETED if why == "searcher" else TrialState.CANCELED
        error = _error_of_last_run(work, trial) if why == "searcher" else None
        end_trial(work, trial, TrialState.ERROR if error else state, error=error)
        return
    move_trial(work, trial, TrialState.STOPPING)
    if why in {"kill", "error"}:
        kill_run(work, trial["run_id"])
        return
    direct_run(work, trial["run_id"], "stop")
    run = work.find(runs, trial["run_id"])
    if why == "cancel" and not run["killed"] and _never_asks(work.orchestrator, run):
        text = (
            f"run {run['id']}: its command does not ask whether to leave: its processes get "
            f"SIGTERM, and SIGKILL {LEAVE_GRACE_S:.0f} s later"
        )
        work.log_line(run, text, "WARNING")
        kill_run(work, run["id"])


def _error_of_last_run(work: UnitOfWork, trial: RowMapping) -> str | None:
    """Return why the last run of a trial failed; None if it did not, or the trial never ran."""
    if not trial["restarts"]:  # every failure counts as one, or has ended the trial
        return None
    query = select(runs).where(runs.c.trial_id == trial["id"]).order_by(runs.c.id.desc()).limit(1)
    last = work.connection.execute(query).mappings().one_or_none()
    if last is None or last["killed"] or not is_failure(last["exit_code"] or 0):
        return None
    return str(last["reason"] or f"exit code {last['exit_code']}")


def fail_experiment(work: UnitOfWork, experiment_id: int, error: str) -> None:
    """End an experiment with an error of its own, and its trials with it.

    Args:
        work: Unit of work.
        experiment_id: Any; one that has ended, or is about to, stays as it is.
        error: One line for the user.
    """
    experiment = work.find(experiments, experiment_id)
    if experiment["state"] in EXPERIMENT_ENDED | EXPERIMENT_STOPPING:
        return
    move_experiment(work, experiment, ExperimentState.STOPPING_ERROR, error=error)
    cancel_idle_trials(work, experiment_id, "kill")
    running = select(trials).where(
        trials.c.experiment_id == experiment_id, trials.c.state.not_in(TRIAL_ENDED)
    )
    for trial in work.connection.execute(running.order_by(trials.c.id)).mappings().all():
        stop_trial(work, trial, "kill")
    settle_experiment(work, experiment_id)


def cancel_idle_trials(work: UnitOfWork, experiment_id: int, why: str) -> None:
    """End all trials without a run, of an experiment that is stopping; there may be thousands."""
    idle = (
        trials.c.experiment_id == experiment_id,
        trials.c.run_id.is_(None),
        trials.c.state.in_([TrialState.QUEUED, TrialState.PAUSED]),
    )
    found = list(work.connection.scalars(select(trials.c.id).where(*idle)))
    work.connection.execute(
        update(trials)
        .where(*idle)
        .values(state=TrialState.CANCELED, stop=why, restart_at=None, ended_at=work.clock())
    )
    work.touch_trials(experiment_id, found)
    moves = [(TrialState.QUEUED, TrialState.CANCELED)] * len(found)
    _count_moves(work, experiment_id, moves)
    if found:
        apply_to_experiment(work, experiment_id)


def direct_run(work: UnitOfWork, run_id: int, directive: str) -> None:
    """Ask a run to checkpoint and exit; the experiment's preemption timeout starts to run."""
    run = work.find(runs, run_id)
    if run["directive"] == "stop" or run["directive"] == directive:
        return
    timeout = work.config(run["experiment_id"]).preemption_timeout
    deadline = run["deadline_at"]
    if deadline is None and timeout is not None:
        deadline = work.steady() + timeout
    work.save(runs, run_id, directive=directive, deadline_at=deadline)
    work.changes.append(Change(f"run:{run_id}"))
    if directive == "preempt" and _never_asks(work.orchestrator, run):
        end = "" if timeout is None else f" until it is killed, in {timeout} s (preemption_timeout)"
        text = (
            f"run {run_id} shall save and leave, but its command does not ask whether to: it runs "
            f"on{end}; `zerolab.core` asks"
        )
        work.log_line(run, text, "WARNING")


def _never_asks(orchestrator: Orchestrator, run: RowMapping) -> bool:
    """Whether a run is a command that has not asked whether to leave, though it could have."""
    up_s = time.monotonic() - orchestrator.started
    if run["id"] in orchestrator.asking or (
        up_s < _ASKS_AGAIN_S and orchestrator.clock() - run["created_at"] > up_s
    ):
        return False
    return isinstance(msgspec.json.decode(run["spec"], type=RunSpec).entrypoint, Command)


def kill_run(work: UnitOfWork, run_id: int) -> None:
    """Have the agent end a run's processes now."""
    run = work.find(runs, run_id)
    if not run["killed"]:
        work.save(runs, run_id, killed=1, killed_at=work.clock())
    work.changes.append(agents_changed())


def end_trial(
    work: UnitOfWork,
    trial: RowMapping,
    state: TrialState,
    *,
    error: str | None = None,
    reason: str | None = None,
) -> None:
    """Move a trial into its final state and tell the searcher.

    Args:
        work: Unit of work.
        trial: One that has not ended.
        state: A final one.
        error: One line for the user.
        reason: Why it ended early, for the searcher; None when it has done all it should.
    """
    now = work.clock()
    values: dict[str, Any] = {"run_id": None, "restart_at": None, "ended_at": now, "error": error}
    if state == TrialState.COMPLETED and reason is None and trial["stop"] is None:
        values["progress"] = 1.0
    move_trial(work, trial, state, **values)
    apply_to_trial(work, trial["id"])
    if state != TrialState.COMPLETED and trial["started_at"] is not None:
        discard_unfinished(work, trial)
    experiment = work.experiment_of(trial)
    over = experiment["state"] in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
    if not over and not experiment["searcher_done"]:
        if state == TrialState.COMPLETED and reason is None:
            event = Event("exited", trial["request_id"])
        else:
            default = "errored" if state == TrialState.ERROR else "user_canceled"
            event = Event("exited_early", trial["request_id"], reason=reason or default)
        tell_searcher(work, trial["experiment_id"], event)
    settle_experiment(work, trial["experiment_id"])
