"""State changes of runs (assigned, started, ended), and of a trial after its run."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import RowMapping, func, select

from zerolab.contract.hparam_reads import searched_names
from zerolab.contract.messages import RunExit
from zerolab.contract.names import printable
from zerolab.contract.outcome import BEYOND_BOUND, is_failure
from zerolab.contract.secret_text import mask_values
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_USER_ERROR,
    CheckpointRef,
    FitSpec,
    RunSpec,
)
from zerolab.errors import StaleRunError
from zeroserver.orchestrator.log_policies import Match, apply_matches
from zeroserver.orchestrator.nodes import all_ended, failed_before_its_kill, spread
from zeroserver.orchestrator.state import (
    agents_changed,
    owner_of,
    resolved_config,
)
from zeroserver.orchestrator.trials import end_trial, move_trial, resting_state
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import reference
from zeroserver.states import (
    RUN_MOVES,
    TRIAL_ENDED,
    RunState,
    TrialState,
    check_move,
)
from zeroserver.store.database import Change
from zeroserver.store.points import forget_after
from zeroserver.store.schema import (
    agents,
    checkpoints,
    experiments,
    metric_keys,
    points,
    runs,
    trials,
)

__all__ = [
    "assign",
    "current_run",
    "exited",
    "no_metric_at",
    "show_activity",
    "shown_activity",
    "started",
]

_SIGNALS_ABOVE = 128
"""A shell exits with 128 + n when signal n has killed its command."""


def current_run(work: UnitOfWork, run_id: int) -> tuple[RowMapping, RowMapping]:
    """Return a run and its trial, if the run may still speak for the trial.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If it has ended, or another run has taken over.
    """
    run = work.find(runs, run_id)
    trial = work.trial_of(run)
    if run["state"] == RunState.EXITED or trial["run_id"] != run_id:
        msg = f"run {run_id} of trial {trial['id']} has ended here, or another run has taken over"
        raise StaleRunError(msg)
    return run, trial


def assign(work: UnitOfWork, trial: RowMapping, slots: Mapping[int, Sequence[int]]) -> int | None:
    """Begin a new run of a trial on some slots of one agent or of several; return its id.

    Points after the checkpoint that it starts from are forgotten, for it reports them again. Of a
    long trial one change forgets a part of them, and returns None: ask again in another change.
    """
    experiment = work.experiment_of(trial)
    checkpoint = _latest_checkpoint(work, trial)
    if checkpoint is not None:
        saved_on = _other_agent(work, checkpoint.uuid, slots)
        checkpoint = msgspec.structs.replace(checkpoint, saved_on=saved_on)
    steps = checkpoint.steps_completed if checkpoint else 0
    own = checkpoint is not None and not checkpoint.warm_start
    after = steps if own else -1
    forgotten = forget_after(work, trial["id"], after, work.orchestrator.forgettable)
    if forgotten is None:
        work.orchestrator.forgettable = 0
        return None
    work.orchestrator.forgettable -= forgotten
    storage = work.storage_of(experiment["id"])
    (agent_id, slot_ids), *others = slots.items()
    unit = experiment["slots_per_rank"]
    now = work.clock()
    row: dict[str, Any] = {
        "trial_id": trial["id"],
        "experiment_id": experiment["id"],
        "agent_id": agent_id,
        "slot_ids": msgspec.json.encode(slot_ids).decode(),
        "state": RunState.ASSIGNED,
        "spec": "",
        "created_at": now,
    }
    from zerolab.config.experiment.run_spec import (
        run_spec_fields,  # pydantic, not before it is needed
    )

    made = work.connection.execute(runs.insert().values(row).returning(runs.c.id))
    run_id = int(made.scalar_one())
    sections = run_spec_fields(work.config(experiment["id"]))
    sections["fit"] = msgspec.structs.replace(sections["fit"], until=_bound(sections["fit"], trial))
    on_hosts = sum(len(one.slots) for one in sections["hosts"])
    spec = RunSpec(
        experiment_id=experiment["id"],
        trial_id=trial["id"],
        run_id=run_id,
        **sections,
        config=mask_secrets(resolved_config(experiment), for_trial=True),
        hparams=msgspec.json.decode(trial["hparams"]),
        trial_seed=trial["seed"],
        slots=on_hosts or sum(map(len, slots.values())) // unit,
        planned_slots=on_hosts or experiment["slots"] // unit,
        slots_per_rank=unit,
        nodes=spread(work, run_id, slots, unit) if others else None,
        model_dir="",
        run_dir="",
        checkpoint_dir=storage.root,
        storage_options=storage.options,
        storage_owner=owner_of(work.orchestrator, trial["id"]),
        latest_checkpoint=checkpoint,
        restarts=trial["restarts"],
        test_mode=bool(experiment["test_mode"]),
    )
    work.save(runs, run_id, spec=msgspec.json.encode(spec).decode())
    work.save(
        trials, trial["id"], run_id=run_id, restart_at=None, activity=None,
        steps_completed=steps, error=None,
        started_at=trial["started_at"] or now,
    )  # fmt: skip
    work.touch("trial", experiment["id"], trial["id"])
    if experiment["started_at"] is None or experiment["waits_since"] is not None:
        started_at = experiment["started_at"] or now
        work.save(
            experiments, experiment["id"], started_at=started_at, waits_since=None
        )  # a run may be over before the clock ticks again
    work.changes.append(agents_changed())
    return run_id


def _bound(fit: FitSpec, trial: RowMapping) -> int | None:
    """Where the run pauses: at what the searcher said, unless that is the end of the trial."""
    whole = fit.max_length.count if fit.max_length is not None else None
    until: int | None = trial["until"]
    return until if until is not None and whole is not None and until < whole else None


def started(work: UnitOfWork, run_id: int, now: float) -> None:
    """Note that the processes of a run are there; saying it again changes nothing.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If it has ended, or another run has taken over.
    """
    run, trial = current_run(work, run_id)
    if run["state"] == RunState.RUNNING:
        return
    work.save(runs, run_id, state=RunState.RUNNING, started_at=now)
    if trial["state"] == TrialState.QUEUED:
        move_trial(work, trial, TrialState.RUNNING)
        work.save(trials, trial["id"], activity=None)  # a step of its start is over


def show_activity(work: UnitOfWork, run_id: int, text: str) -> None:
    """Note what a run does, for those who look at its trial.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If it has ended, or another run has taken over.
    """
    _, trial = current_run(work, run_id)
    work.save(trials, trial["id"], activity=shown_activity(text))
    work.touch("trial", trial["experiment_id"], trial["id"])


def shown_activity(text: str) -> str:
    """What is kept of what a run says it does."""
    return printable(text[:100])


def exited(
    work: UnitOfWork,
    run_id: int,
    end: RunExit,
    matches: Sequence[Match] = (),
) -> None:
    """End a run and decide what becomes of its trial; saying it again changes nothing.

    A run on several agents ends when all of them have told how their ranks did.

    Args:
        work: Unit of work.
        run_id: The run.
        end: How it ended.
        matches: What the log policies found in the tail of its log.

    Raises:
        NotFoundError: If there is no such run.
    """
    run = work.find(runs, run_id)
    if run["state"] == RunState.EXITED:
        return
    check_move(RUN_MOVES, f"run {run_id}", run["state"], RunState.EXITED)
    secrets = work.secrets_of(run["experiment_id"])
    end = msgspec.structs.replace(end, reason=_line(mask_values(end.reason or "", secrets)))
    _note_unread(work, run, end)
    merged = all_ended(work, run, end, matches)
    if merged is None:
        return
    end = merged
    now = work.clock()
    reason = end.reason
    if run["grows_to"] is not None and end.exit_code == EXIT_PREEMPTED:
        reason = f"it left for more slots: {run['grows_to']} were free for its trial"
    end = msgspec.structs.replace(end, reason=reason)
    work.save(
        runs, run_id, state=RunState.EXITED, ended_at=now,
        exit_code=end.exit_code, reason=end.reason,
    )  # fmt: skip
    work.changes += [Change(f"run:{run_id}"), agents_changed()]
    work.orchestrator.asking.discard(run_id)
    trial = work.trial_of(run)
    if trial["run_id"] != run_id or trial["state"] in TRIAL_ENDED:
        return
    apply_matches(work, run, matches)
    work.save(trials, trial["id"], run_id=None, activity=None)
    _decide(work, work.find(runs, run_id), end)


def _note_unread(work: UnitOfWork, run: RowMapping, end: RunExit) -> None:
    """Keep the searched hyperparameters that no run of the experiment has read."""
    if end.unread_hparams is None or end.exit_code not in (0, EXIT_REACHED):
        return
    experiment = work.find(experiments, run["experiment_id"])
    before = experiment["unread_hparams"]
    if before is None:
        space = msgspec.json.decode(experiment["config"]).get("hyperparameters")
        known = searched_names(space)
    else:
        known = msgspec.json.decode(before)
    unread = [name for name in known if name in end.unread_hparams]
    if before is None or unread != known:
        text = msgspec.json.encode(unread).decode()
        work.save(experiments, experiment["id"], unread_hparams=text)


def _line(text: str | None) -> str | None:
    """Make one line of a reason, short enough to show."""
    return " ".join(text.replace("\0", "").split())[:2000] or None if text else None


def _decide(work: UnitOfWork, run: RowMapping, end: RunExit) -> None:
    trial = work.trial_of(run)
    code = end.exit_code
    forced = (  # it was too slow to leave
        bool(run["killed"])
        and run["directive"] != "train"
        and not failed_before_its_kill(work.connection, run)
    )
    failed = is_failure(code) and not forced
    if trial["stop"] == "error":
        end_trial(work, trial, TrialState.ERROR, error=trial["error"])
    elif trial["stop"] == "searcher" and failed:  # whatever it has reported before
        _fail_trial(work, run, trial, end, "the searcher needs no more of it")
    elif trial["stop"] is not None:
        by_searcher = trial["stop"] == "searcher"
        state = TrialState.COMPLETED if by_searcher else TrialState.CANCELED
        end_trial(work, trial, state)
    elif code == 0:
        end_trial(work, trial, TrialState.COMPLETED)
    elif code == EXIT_PREEMPTED or forced:
        _wait_again(work, trial)
    elif code == EXIT_REACHED:
        _reached(work, run, trial, end)
    elif code == EXIT_USER_ERROR:
        error = end.reason or "the trial cannot work as it is written or configured"
        work.log_line(run, f"run {run['id']}: {error}; no restart", "ERROR")
        end_trial(work, trial, TrialState.ERROR, error=error)
    elif code == EXIT_INVALID_HP:
        error = end.reason or "the trial declared its hyperparameters invalid"
        work.log_line(run, f"run {run['id']}: {error}", "WARNING")
        end_trial(work, trial, TrialState.COMPLETED, error=error, reason="invalid_hp")
    elif trial["waits"] and not failed:
        _wait_again(work, trial)
    elif code == EXIT_INFRASTRUCTURE and not run["no_retry"]:
        _stood_on_nothing(work, run, trial, end)
    else:
        _failed(work, run, trial, end)


def _wait_again(work: UnitOfWork, trial: RowMapping) -> None:
    """Queue a trial that gave its slots back, unless something has it wait."""
    experiment = work.experiment_of(trial)
    move_trial(work, trial, resting_state(experiment["state"], trial))


def _reached(work: UnitOfWork, run: RowMapping, trial: RowMapping, end: RunExit) -> None:
    """Pause a trial at its rung, or queue it if the searcher has let it go on meanwhile."""
    bound = msgspec.json.decode(run["spec"], type=RunSpec).fit
    went_on = bound is not None and bound.until is not None and trial["until"] != bound.until
    if trial["waits"] or went_on:
        if end.reason and BEYOND_BOUND in end.reason:  # shown while it waits
            work.save(trials, trial["id"], error=end.reason)
        _wait_again(work, trial)
        return
    metric = work.experiment_of(trial)["metric"]
    error = no_metric_at(trial["until"], metric)
    work.log_line(run, f"run {run['id']}: {error}; no restart", "ERROR")
    end_trial(work, trial, TrialState.ERROR, error=error)


def no_metric_at(length: float, metric: str) -> str:
    """Say that a trial has not told its searcher what it is compared by."""
    return (
        f"searcher.metric: must be reported by a validation at length {length:g}, where the "
        f"searcher compares trials, got no {metric!r} there"
    )


def _failed(work: UnitOfWork, run: RowMapping, trial: RowMapping, end: RunExit) -> None:
    """Start a failed trial again, or end it where that is of no use."""
    config = work.config(trial["experiment_id"])
    why = None
    if run["no_retry"]:
        why = "a log policy forbids a restart"
    elif trial["restarts"] >= config.max_restarts:
        why = f"it has been restarted {trial['restarts']} times (max_restarts)"
    elif _would_fail_again(work, trial, end.exit_code):
        why = "it failed before its first report, and would fail there again"
    if why is not None:
        _fail_trial(work, run, trial, end, why)
        return
    number = trial["restarts"] + 1
    work.save(trials, trial["id"], restarts=number)
    wait = _restart_later(work, trial, number)
    reason = _reason(end)
    text = f"run {run['id']} failed: {reason}; restart {number} of {config.max_restarts} "
    text += "when the searcher resumes the trial" if trial["waits"] else f"in {wait:g} s"
    work.log_line(run, text, "WARNING")


def _fail_trial(
    work: UnitOfWork,
    run: RowMapping,
    trial: RowMapping,
    end: RunExit,
    why: str,
) -> None:
    """End a trial with the error of its last run; ``why`` says why there is no restart."""
    reason = _reason(end)
    text = f"run {run['id']} failed: {reason}; no restart: {why}"
    work.log_line(run, text, "ERROR")
    end_trial(work, trial, TrialState.ERROR, error=reason)


def _reason(end: RunExit) -> str:
    return end.reason or f"exit code {end.exit_code}"


def _would_fail_again(work: UnitOfWork, trial: RowMapping, exit_code: int) -> bool:
    """Return whether a restart is of no use: the code failed before it reported anything.

    A death by a signal may have a cause outside. So may the failure of a trial that was restarted
    before. A command that need not report, such as a task, is restarted if its file sets
    ``max_restarts``.
    """
    by_signal = exit_code < 0 or exit_code > _SIGNALS_ABOVE
    if by_signal or trial["restarts"] or trial["latest_checkpoint"] is not None:
        return False
    experiment = work.experiment_of(trial)
    if not experiment["metric"] and "max_restarts" in msgspec.json.decode(experiment["raw_config"]):
        return False
    reported = (
        select(points.c.step)
        .join(metric_keys, metric_keys.c.id == points.c.key_id)
        .where(points.c.trial_id == trial["id"], metric_keys.c.group_name != "system")
        .limit(1)
    )
    return work.connection.scalar(reported) is None


def _stood_on_nothing(work: UnitOfWork, run: RowMapping, trial: RowMapping, end: RunExit) -> None:
    """Start a trial again whose machine, agent or storage failed, without counting it."""
    wait = _restart_later(work, trial, _in_a_row(work, trial["id"]))
    reason = end.reason or "its machine or its storage failed"
    text = f"run {run['id']} was lost: {reason}; it starts again in {wait:g} s, not counted"
    work.log_line(run, text, "WARNING")


def _in_a_row(work: UnitOfWork, trial_id: int) -> int:
    """How many of a trial's runs were lost one after another, the last one included."""
    last_other = (
        select(func.max(runs.c.id))
        .where(runs.c.trial_id == trial_id, runs.c.exit_code != EXIT_INFRASTRUCTURE)
        .correlate(None)
        .scalar_subquery()
    )
    query = select(func.count()).where(
        runs.c.trial_id == trial_id, runs.c.id > func.coalesce(last_other, 0)
    )
    return int(work.connection.execute(query).scalar_one())


def _restart_later(work: UnitOfWork, trial: RowMapping, number: int) -> float:
    """Queue a trial, not to start before a pause that doubles with ``number``; return it."""
    timings = work.settings.timings
    wait = min(timings.backoff_first_s * 2.0 ** min(number - 1, 32), timings.backoff_most_s)
    work.save(trials, trial["id"], restart_at=work.steady() + wait)
    _wait_again(work, trial)
    return wait


def _latest_checkpoint(work: UnitOfWork, trial: RowMapping) -> CheckpointRef | None:
    if trial["latest_checkpoint"] is None:
        found = reference(work, trial)
        return found and _with_options(work, found)
    query = select(checkpoints.c.uuid, checkpoints.c.steps_completed).where(
        checkpoints.c.uuid == trial["latest_checkpoint"]
    )
    row = work.connection.execute(query).one()
    return CheckpointRef(row.uuid, row.steps_completed)


def _other_agent(work: UnitOfWork, uuid: str, slots: Mapping[int, Sequence[int]]) -> str:
    """Name the agent that saved a checkpoint, unless it is the only one of a new run."""
    query = (
        select(runs.c.agent_id, agents.c.name, agents.c.host)
        .join(checkpoints, checkpoints.c.run_id == runs.c.id)
        .outerjoin(agents, agents.c.id == runs.c.agent_id)
        .where(checkpoints.c.uuid == uuid)
    )
    row = work.connection.execute(query).one_or_none()
    if row is None or set(slots) == {row.agent_id}:
        return ""
    return "an agent that was removed" if row.name is None else f"agent {row.name} ({row.host})"


def _with_options(work: UnitOfWork, reference: CheckpointRef) -> CheckpointRef:
    """Say how to open the storage of another experiment, in which a checkpoint lies."""
    query = select(checkpoints.c.experiment_id).where(checkpoints.c.uuid == reference.uuid)
    experiment_id = work.connection.execute(query).scalar_one()
    options = work.storage_of(experiment_id).options
    return msgspec.structs.replace(reference, options=options)
