"""Actions of users: submit, pause, activate, cancel, kill, delete, fork."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import ColumnElement, RowMapping, delete, func, select, text, update

from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConflictError
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.checkpoints.registry import refuse_while_registered
from zeroserver.orchestrator.checkpoints.retention import let_go
from zeroserver.orchestrator.cluster.slurm import check_pool_holds
from zeroserver.orchestrator.continuation import why_through
from zeroserver.orchestrator.experiments import (
    move_experiment,
    resource_columns,
    settle_experiment,
)
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.state import (
    Orchestrator,
)
from zeroserver.orchestrator.trials import (
    cancel_idle_trials,
    carry_out,
    direct_run,
    move_trial,
    resting_state,
    stop_trial,
)
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import (
    forget_source,
    refuse_while_needed,
    settle_sources,
    source_of_experiment,
)
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_ENDED,
    TRIAL_ACTIONS,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
)
from zeroserver.store.archives import ArchiveGoneError, has_archive, remove_archive
from zeroserver.store.schema import (
    WEIGHTS_MISSING,
    checkpoints,
    experiments,
    trials,
)

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config import ExperimentConfig

__all__ = [
    "Submission",
    "act",
    "act_on_trial",
    "create",
    "let_archive_go",
    "remove",
    "remove_trial",
]


@dataclass(frozen=True)
class Submission:
    """An experiment that has been checked."""

    config: "ExperimentConfig"
    raw_config: Mapping[str, Any]
    archive: str | None
    """SHA-256 of the model directory's archive."""
    seed: int
    activate: bool = True
    test_mode: bool = False
    forked_from: int | None = None
    warnings: Sequence[str] = ()
    """What whoever submits it is told, beside its number."""
    begun: list[searching.Begun] = field(default_factory=list)
    """Its searcher, made beforehand; for one attempt, since the searcher changes with it."""


def create(work: UnitOfWork, submission: Submission) -> int:
    """Store an experiment, make its first trials and return its id.

    Raises:
        ArchiveGoneError: If its archive is not there, or not for long: store it again.
    """
    archive = submission.archive
    if archive is not None and (
        archive in work.orchestrator.archives_going or not has_archive(work.home.archives, archive)
    ):
        msg = f"the archive {archive} was removed with the last experiment that had it"
        raise ArchiveGoneError(msg)
    check_pool_holds(work.connection, submission.config)
    searching.check_custom_class(work.orchestrator, submission.config)
    row = _row(work.orchestrator, submission)
    row["source_checkpoint"] = source_of_experiment(work, submission.config.searcher)
    made = work.connection.execute(experiments.insert().values(row).returning(experiments.c.id))
    experiment_id = int(made.scalar_one())
    work.save(experiments, experiment_id, position=experiment_id)
    begun = (
        submission.begun.pop()
        if submission.begun
        else searching.Begun.of(submission.config, submission.seed)
    )
    operations = searching.first_operations(work, experiment_id, begun)
    carry_out(work, experiment_id, operations)
    settle_experiment(work, experiment_id)
    schedule(work)
    return experiment_id


def _row(orchestrator: Orchestrator, submission: Submission) -> dict[str, Any]:
    config = submission.config
    resolved = config.to_dict()
    resolved["reproducibility"]["experiment_seed"] = submission.seed
    return {
        "name": config.name,
        "description": config.description or "",
        "labels": _json(config.labels),
        "state": ExperimentState.ACTIVE if submission.activate else ExperimentState.PAUSED,
        "config": _json(mask_secrets(resolved)),
        "raw_config": _json(submission.raw_config),
        "archive": submission.archive,
        "test_mode": int(submission.test_mode),
        "forked_from": submission.forked_from,
        "searcher_name": config.searcher.name,
        "metric": config.searcher.metric or "",
        "smaller_is_better": int(config.searcher.smaller_is_better),
        "seed": submission.seed,
        **resource_columns(config),
        "created_at": orchestrator.clock(),
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def act(work: UnitOfWork, experiment_id: int, action: str) -> None:
    """Pause, activate, cancel, kill, archive or unarchive; doing it twice changes nothing.

    Raises:
        NotFoundError: If there is no such experiment.
        ConflictError: If its state does not allow it.
    """
    experiment = work.find(experiments, experiment_id)
    if EXPERIMENT_ACTIONS[action].wanted("experiment", experiment_id, experiment["state"]):
        _ACTIONS[action](work, experiment)
        work.touch("experiment", experiment_id, experiment_id)
        schedule(work)


def _open_trials(work: UnitOfWork, experiment_id: int) -> list[RowMapping]:
    query = select(trials).where(
        trials.c.experiment_id == experiment_id, trials.c.state.not_in(TRIAL_ENDED)
    )
    return list(work.connection.execute(query.order_by(trials.c.id)).mappings())


def _pause(work: UnitOfWork, experiment: RowMapping) -> None:
    number = experiment["id"]
    move_experiment(work, experiment, ExperimentState.PAUSED)
    held = select(trials.c.run_id).where(
        trials.c.experiment_id == number,
        trials.c.run_id.is_not(None),
        trials.c.state.not_in(TRIAL_ENDED),
    )
    for run_id in work.connection.scalars(held.order_by(trials.c.id)).all():
        direct_run(work, run_id, "preempt")
    idle = trials.c.state == TrialState.QUEUED
    _move_idle(work, number, idle, TrialState.PAUSED)
    waiting = select(trials.c.source_trial_id).where(
        trials.c.experiment_id == number, text(WEIGHTS_MISSING)
    )
    for source in set(work.connection.scalars(waiting)):  # none may come any more
        settle_sources(work, source)


def _activate(work: UnitOfWork, experiment: RowMapping) -> None:
    move_experiment(work, experiment, ExperimentState.ACTIVE)
    free = (trials.c.state == TrialState.PAUSED) & (trials.c.waits == 0) & (trials.c.held == 0)
    _move_idle(work, experiment["id"], free, TrialState.QUEUED)


def _move_idle(
    work: UnitOfWork,
    experiment_id: int,
    which: ColumnElement[bool],
    state: TrialState,
) -> None:
    """Move all trials without a run at once: there may be thousands."""
    mine = (trials.c.experiment_id == experiment_id) & trials.c.run_id.is_(None) & which
    if work.has_readers(experiment_id):
        moved = select(trials.c.id).where(mine).order_by(trials.c.id)
        work.touch_trials(experiment_id, work.connection.scalars(moved))
    work.connection.execute(update(trials).where(mine).values(state=state))


def _stop(work: UnitOfWork, experiment: RowMapping, state: ExperimentState) -> None:
    move_experiment(work, experiment, state)
    why = "kill" if state == ExperimentState.STOPPING_KILLED else "cancel"
    cancel_idle_trials(work, experiment["id"], why)
    for trial in _open_trials(work, experiment["id"]):
        stop_trial(work, trial, why)
    settle_experiment(work, experiment["id"])


def _cancel(work: UnitOfWork, experiment: RowMapping) -> None:
    _stop(work, experiment, ExperimentState.STOPPING_CANCELED)


def _kill(work: UnitOfWork, experiment: RowMapping) -> None:
    _stop(work, experiment, ExperimentState.STOPPING_KILLED)


def _archive(work: UnitOfWork, experiment: RowMapping) -> None:
    work.save(experiments, experiment["id"], archived=1)


def _unarchive(work: UnitOfWork, experiment: RowMapping) -> None:
    work.save(experiments, experiment["id"], archived=0)


_ACTIONS = {
    "pause": _pause,
    "activate": _activate,
    "cancel": _cancel,
    "kill": _kill,
    "archive": _archive,
    "unarchive": _unarchive,
}


def act_on_trial(work: UnitOfWork, trial_id: int, action: str) -> None:
    """Pause, activate, cancel, kill, archive or unarchive one trial; twice changes nothing.

    Raises:
        NotFoundError: If there is no such trial.
        ConflictError: If its state, or its experiment's, does not allow it.
    """
    trial = work.find(trials, trial_id)
    wish, state = TRIAL_ACTIONS[action], trial["state"]
    over = state in TRIAL_ENDED and state in wish.instead
    remedy = why_through(work, trial) if over else None
    if wish.wanted("trial", trial_id, state, remedy):
        _TRIAL_ACTIONS[action](work, trial)
        work.touch("trial", trial["experiment_id"], trial_id)
        schedule(work)


def _pause_trial(work: UnitOfWork, trial: RowMapping) -> None:
    work.save(trials, trial["id"], held=1)
    if trial["run_id"] is not None:
        direct_run(work, trial["run_id"], "preempt")
    else:
        move_trial(work, trial, TrialState.PAUSED)


def _activate_trial(work: UnitOfWork, trial: RowMapping) -> None:
    """Undo a pause of this trial alone; what else has it wait is told."""
    experiment = work.experiment_of(trial)
    number, home = trial["id"], experiment["id"]
    if trial["run_id"] is None and experiment["state"] != ExperimentState.ACTIVE:
        msg = (
            f"trial {number}: its experiment {home} is {experiment['state']}; "
            f"`zerolab experiment activate {home}` first"
        )
        raise ConflictError(msg)
    if trial["run_id"] is None and trial["waits"] and not trial["held"]:
        msg = (
            f"trial {number}: waits for the searcher, which lets it go on if it is among the best; "
            f"to train it by itself, `zerolab trial fork {number}`"
        )
        raise ConflictError(msg)
    work.save(trials, number, held=0)
    if trial["run_id"] is None:
        free = {**trial, "held": 0}
        move_trial(work, trial, resting_state(ExperimentState.ACTIVE, free))


def _cancel_trial(work: UnitOfWork, trial: RowMapping) -> None:
    stop_trial(work, trial, "cancel")


def _kill_trial(work: UnitOfWork, trial: RowMapping) -> None:
    stop_trial(work, trial, "kill")


def _archive_trial(work: UnitOfWork, trial: RowMapping) -> None:
    work.save(trials, trial["id"], archived=1)


def _unarchive_trial(work: UnitOfWork, trial: RowMapping) -> None:
    work.save(trials, trial["id"], archived=0)


_TRIAL_ACTIONS = {
    "pause": _pause_trial,
    "activate": _activate_trial,
    "cancel": _cancel_trial,
    "kill": _kill_trial,
    "archive": _archive_trial,
    "unarchive": _unarchive_trial,
}


def remove(work: UnitOfWork, experiment_id: int) -> bool:
    """Delete an experiment that has ended, with its rows and files, and an archive of its own.

    Of a large one only a part is deleted, as much as one change may cost: call it again until all
    is deleted. What is left in between is an experiment of which checkpoints, then trials, were
    deleted.

    Returns:
        Whether all of it is deleted.

    Raises:
        NotFoundError: If there is no such experiment.
        ConflictError: If it has not ended, another one begins with a checkpoint of it, or one of
            them is registered.
    """
    experiment = work.find(experiments, experiment_id)
    EXPERIMENT_ACTIONS["delete"].wanted("experiment", experiment_id, experiment["state"])
    work.touch("experiment", experiment_id, experiment_id)
    if not _remove_part(work, experiment):
        if not experiment["deleting"]:
            work.save(experiments, experiment_id, deleting=1)
        return False
    work.orchestrator.drop_jobs([experiment_id])
    let_archive_go(work, experiment["archive"])
    return True


def _remove_part(work: UnitOfWork, experiment: RowMapping) -> bool:
    """Delete checkpoints, trials or events of an experiment; with the last ones, its row."""
    experiment_id = experiment["id"]
    mine = checkpoints.c.experiment_id == experiment_id
    refuse_while_needed(work, f"experiment {experiment_id}", mine)
    refuse_while_registered(work, f"experiment {experiment_id}", mine)
    if _discard_checkpoints(work, experiment_id, mine) == _CHECKPOINTS_AT_ONCE:
        return False
    ids = work.raw(_SOME_TRIALS, (experiment_id, _TRIALS_AT_ONCE))
    _remove_trials(work, [trial_id for (trial_id,) in ids])
    if len(ids) == _TRIALS_AT_ONCE:
        _count_again(work, experiment)
        return False
    if work.run(_REMOVE_EVENTS, (experiment_id, _EVENTS_AT_ONCE)) == _EVENTS_AT_ONCE:
        _count_again(work, experiment)
        return False
    work.connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
    return True


_CHECKPOINTS_AT_ONCE = 1000
_TRIALS_AT_ONCE = 1000
_EVENTS_AT_ONCE = 20_000
_SOME_TRIALS = "SELECT id FROM trials WHERE experiment_id = ? ORDER BY id LIMIT ?"
_REMOVE_EVENTS = (
    "DELETE FROM searcher_events WHERE id IN "
    "(SELECT id FROM searcher_events WHERE experiment_id = ? ORDER BY id LIMIT ?)"
)


def _discard_checkpoints(work: UnitOfWork, experiment_id: int, whose: ColumnElement[bool]) -> int:
    """Delete checkpoints that nothing needs, not too many at once; return how many."""
    there = select(checkpoints.c.uuid).where(whose, checkpoints.c.state != "DELETED")
    uuids = work.connection.scalars(there.limit(_CHECKPOINTS_AT_ONCE)).all()
    # What was imported has none, and no storage.
    let_go(work, experiment_id, uuids)
    return len(uuids)


def _remove_trials(work: UnitOfWork, trial_ids: Sequence[int]) -> None:
    """Delete trials whose checkpoints were discarded, with their runs."""
    orphan(work, trial_ids)
    keys = [(trial_id,) for trial_id in trial_ids]
    for statement in _REMOVE_TRIAL:
        work.many(statement, keys)


_REMOVE_TRIAL = (
    "DELETE FROM run_nodes WHERE run_id IN (SELECT id FROM runs WHERE trial_id = ?)",
    "DELETE FROM checkpoints WHERE trial_id = ?",
    "DELETE FROM runs WHERE trial_id = ?",
    "DELETE FROM trials WHERE id = ?",
)


def remove_trial(work: UnitOfWork, trial_id: int) -> bool:
    """Delete a trial of an experiment that has ended, with its metrics, logs and checkpoints.

    Of a trial with very many checkpoints only some of them are deleted: call it again.

    What its searcher was told stays, so that the trial is not created again if the experiment is
    continued; the searcher is then told that it will not come back.

    Returns:
        Whether all of it is deleted.

    Raises:
        NotFoundError: If there is no such trial.
        ConflictError: If it or its experiment has not ended, a trial of another one begins with a
            checkpoint of it, or one of them is registered.
    """
    trial = work.find(trials, trial_id)
    TRIAL_ACTIONS["delete"].wanted("trial", trial_id, trial["state"])
    experiment = work.experiment_of(trial)
    home, state = experiment["id"], experiment["state"]
    if state not in EXPERIMENT_ENDED:
        msg = (
            f"trial {trial_id}: its experiment {home} is {state}, and the searcher still counts on "
            f"it; `zerolab trial archive {trial_id}` hides it until that has ended"
        )
        raise ConflictError(msg)
    whose = checkpoints.c.trial_id == trial_id
    refuse_while_needed(work, f"trial {trial_id}", whose)
    refuse_while_registered(work, f"trial {trial_id}", whose)
    work.touch("trial", home, trial_id)
    work.touch("experiment", home, home)
    if _discard_checkpoints(work, home, whose) == _CHECKPOINTS_AT_ONCE:
        return False
    forget_source(work, trial_id)
    _remove_trials(work, [trial_id])
    _count_again(work, experiment)
    return True


def _count_again(work: UnitOfWork, experiment: RowMapping) -> None:
    """Count the trials that an experiment has left, and find the best of them."""
    mine = trials.c.experiment_id == experiment["id"]
    value = trials.c.best_validation
    best = work.connection.execute(
        select(trials.c.id, value)
        .where(mine, value.is_not(None))
        .order_by(value.asc() if experiment["smaller_is_better"] else value.desc(), trials.c.id)
        .limit(1)
    ).first()
    work.save(
        experiments, experiment["id"],
        num_trials=work.connection.scalar(select(func.count()).where(mine)),
        failed_trials=_count_in(work, experiment, TrialState.ERROR),
        canceled_trials=_count_in(work, experiment, TrialState.CANCELED),
        best_trial_id=best.id if best else None,
        best_validation=best.best_validation if best else None,
    )  # fmt: skip


def _count_in(work: UnitOfWork, experiment: RowMapping, state: TrialState) -> int:
    query = "SELECT count(*) FROM trials WHERE state = ? AND experiment_id = ?"
    return int(work.raw(query, (str(state), experiment["id"]))[0][0])


def orphan(work: UnitOfWork, trial_ids: Sequence[int]) -> None:
    """Have the points and logs of trials removed in later changes, a part at a time.

    Nobody finds them without their trials. What a server that dies leaves of them, the next one
    removes at its start.
    """
    work.orchestrator.orphans.extend(trial_ids)
    for trial_id in trial_ids:
        work.orchestrator.reported.pop(trial_id, None)
    work.undo.append(partial(_keep_from_sweep, work.orchestrator, frozenset(trial_ids)))


def _keep_from_sweep(orchestrator: Orchestrator, trial_ids: frozenset[int]) -> None:
    others = [each for each in orchestrator.orphans if each not in trial_ids]
    orchestrator.orphans.clear()
    orchestrator.orphans.extend(others)


def let_archive_go(work: UnitOfWork, archive: str | None) -> None:
    """Have an archive that no experiment uses removed after the commit.

    Until then no submission may count on it: :func:`create` refuses.
    """
    others = select(experiments.c.id).where(experiments.c.archive == archive).limit(1)
    if archive is None or work.connection.scalar(others) is not None:
        return

    def remove_file() -> None:
        work.orchestrator.archives_going.discard(archive)
        remove_archive(work.home.archives, archive)

    work.orchestrator.archives_going.add(archive)
    work.undo.append(lambda: work.orchestrator.archives_going.discard(archive))
    work.then.append(remove_file)
