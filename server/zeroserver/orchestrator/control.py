"""What users do: submit, pause, activate, cancel, kill, delete, fork."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import RowMapping, delete, select

from zerolab.errors import ConflictError
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.desk import World, find, save, touch
from zeroserver.orchestrator.experiments import move_experiment, settle_experiment
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.trials import (
    cancel_idle_trials,
    carry_out,
    direct_run,
    move_trial,
    stop_trial,
)
from zeroserver.states import EXPERIMENT_ENDED, TRIAL_ENDED, ExperimentState, TrialState
from zeroserver.store.archives import ArchiveGoneError, has_archive, remove_archive
from zeroserver.store.database import Transaction
from zeroserver.store.schema import (
    checkpoints,
    experiments,
    logs,
    points,
    rollups,
    runs,
    searcher_events,
    trials,
)

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config import ExperimentConfig

__all__ = ["Submission", "act", "create", "kill_trial", "let_archive_go", "remove"]


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


def create(world: World, transaction: Transaction, submission: Submission) -> int:
    """Store an experiment, make its first trials and return its id.

    Raises:
        ArchiveGoneError: If its archive is not there, or not for long: store it again.
    """
    archive = submission.archive
    if archive is not None and (
        archive in world.archives_going or not has_archive(world.home.archives, archive)
    ):
        msg = f"the archive {archive} was removed with the last experiment that had it"
        raise ArchiveGoneError(msg)
    row = _row(world, submission)
    made = transaction.connection.execute(
        experiments.insert().values(row).returning(experiments.c.id)
    )
    experiment_id = int(made.scalar_one())
    operations = searching.first_operations(world, transaction, experiment_id)
    carry_out(world, transaction, experiment_id, operations)
    settle_experiment(world, transaction, experiment_id)
    schedule(world, transaction)
    return experiment_id


def _row(world: World, submission: Submission) -> dict[str, Any]:
    config = submission.config
    resolved = config.to_dict()
    resolved["reproducibility"]["experiment_seed"] = submission.seed
    return {
        "name": config.name,
        "description": config.description or "",
        "labels": _json(config.labels),
        "state": ExperimentState.ACTIVE if submission.activate else ExperimentState.PAUSED,
        "config": _json(resolved),
        "raw_config": _json(submission.raw_config),
        "archive": submission.archive,
        "test_mode": int(submission.test_mode),
        "forked_from": submission.forked_from,
        "searcher_name": config.searcher.name,
        "metric": config.searcher.metric,
        "smaller_is_better": int(config.searcher.smaller_is_better),
        "seed": submission.seed,
        "slots": config.resources.slots_per_trial,
        "priority": config.resources.priority,
        "weight": config.resources.weight,
        "max_slots": config.resources.max_slots,
        "created_at": world.clock(),
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def act(world: World, transaction: Transaction, experiment_id: int, action: str) -> None:
    """Pause, activate, cancel, kill, archive or unarchive; doing it twice changes nothing.

    Raises:
        NotFoundError: If there is no such experiment.
        ConflictError: If its state does not allow it.
    """
    experiment = find(transaction, experiments, experiment_id)
    _ACTIONS[action](world, transaction, experiment)
    touch(transaction, "experiment", experiment_id, experiment_id)
    schedule(world, transaction)


def _open_trials(transaction: Transaction, experiment_id: int) -> list[RowMapping]:
    query = select(trials).where(
        trials.c.experiment_id == experiment_id, trials.c.state.not_in(TRIAL_ENDED)
    )
    return list(transaction.connection.execute(query.order_by(trials.c.id)).mappings())


def _pause(world: World, transaction: Transaction, experiment: RowMapping) -> None:
    move_experiment(transaction, experiment, ExperimentState.PAUSED)
    for trial in _open_trials(transaction, experiment["id"]):
        if trial["run_id"] is not None:
            direct_run(world, transaction, trial["run_id"], "preempt")
        elif trial["state"] == TrialState.QUEUED:
            move_trial(transaction, trial, TrialState.PAUSED)


def _activate(_world: World, transaction: Transaction, experiment: RowMapping) -> None:
    move_experiment(transaction, experiment, ExperimentState.ACTIVE)
    for trial in _open_trials(transaction, experiment["id"]):
        idle = trial["state"] == TrialState.PAUSED and trial["run_id"] is None
        if idle and not trial["waits"]:
            move_trial(transaction, trial, TrialState.QUEUED)


def _stop(
    world: World, transaction: Transaction, experiment: RowMapping, state: ExperimentState
) -> None:
    move_experiment(transaction, experiment, state)
    why = "kill" if state == ExperimentState.STOPPING_KILLED else "cancel"
    cancel_idle_trials(world, transaction, experiment["id"], why)
    for trial in _open_trials(transaction, experiment["id"]):
        stop_trial(world, transaction, trial, why)
    settle_experiment(world, transaction, experiment["id"])


def _cancel(world: World, transaction: Transaction, experiment: RowMapping) -> None:
    if experiment["state"] != ExperimentState.STOPPING_KILLED:
        _stop(world, transaction, experiment, ExperimentState.STOPPING_CANCELED)


def _kill(world: World, transaction: Transaction, experiment: RowMapping) -> None:
    _stop(world, transaction, experiment, ExperimentState.STOPPING_KILLED)


def _archive(_world: World, transaction: Transaction, experiment: RowMapping) -> None:
    _must_have_ended(experiment, "archived")
    save(transaction, experiments, experiment["id"], archived=1)


def _unarchive(_world: World, transaction: Transaction, experiment: RowMapping) -> None:
    save(transaction, experiments, experiment["id"], archived=0)


_ACTIONS = {
    "pause": _pause,
    "activate": _activate,
    "cancel": _cancel,
    "kill": _kill,
    "archive": _archive,
    "unarchive": _unarchive,
}


def _must_have_ended(experiment: RowMapping, what: str) -> None:
    if experiment["state"] not in EXPERIMENT_ENDED:
        msg = (
            f"experiment {experiment['id']}: is {experiment['state']} and can be {what} only when "
            "it has ended; cancel or kill it first"
        )
        raise ConflictError(msg)


def kill_trial(world: World, transaction: Transaction, trial_id: int) -> None:
    """Stop one trial now; a trial that has ended stays as it is.

    Raises:
        NotFoundError: If there is no such trial.
    """
    trial = find(transaction, trials, trial_id)
    if trial["state"] not in TRIAL_ENDED:
        stop_trial(world, transaction, trial, "kill")
        schedule(world, transaction)


def remove(world: World, transaction: Transaction, experiment_id: int) -> None:
    """Delete an experiment that has ended, with its rows and files, and an archive of its own.

    Raises:
        NotFoundError: If there is no such experiment.
        ConflictError: If it has not ended.
    """
    experiment = find(transaction, experiments, experiment_id)
    _must_have_ended(experiment, "deleted")
    connection = transaction.connection
    mine = checkpoints.c.experiment_id == experiment_id
    there = select(checkpoints.c.path).where(mine, checkpoints.c.state != "DELETED")
    for path in connection.scalars(there).all():
        world.janitor.discard(transaction, path)
    ids = select(trials.c.id).where(trials.c.experiment_id == experiment_id)
    for table in (points, rollups):
        connection.execute(delete(table).where(table.c.trial_id.in_(ids)))
    for table in (checkpoints, logs, searcher_events, runs, trials):
        connection.execute(delete(table).where(table.c.experiment_id == experiment_id))
    connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
    touch(transaction, "experiment", experiment_id, experiment_id)
    let_archive_go(world, transaction, experiment["archive"])


def let_archive_go(world: World, transaction: Transaction, archive: str | None) -> None:
    """Have an archive that no experiment uses removed after the commit.

    Until then no submission may count on it: :func:`create` refuses.
    """
    others = select(experiments.c.id).where(experiments.c.archive == archive).limit(1)
    if archive is None or transaction.connection.scalar(others) is not None:
        return

    def remove_file() -> None:
        world.archives_going.discard(archive)
        remove_archive(world.home.archives, archive)

    world.archives_going.add(archive)
    transaction.undo.append(lambda: world.archives_going.discard(archive))
    transaction.then.append(remove_file)
