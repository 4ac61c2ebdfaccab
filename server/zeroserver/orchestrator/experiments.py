"""What becomes of an experiment: its state, and its end with that of its last trial."""

from typing import Any

from sqlalchemy import RowMapping, func, select

from zeroserver.orchestrator.desk import World, find, save, touch
from zeroserver.orchestrator.retention import apply_to_experiment
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_MOVES,
    EXPERIMENT_STOPPING,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
    check_move,
)
from zeroserver.store.database import Transaction
from zeroserver.store.schema import experiments, trials

__all__ = ["move_experiment", "settle_experiment"]


def move_experiment(
    transaction: Transaction, experiment: RowMapping, state: ExperimentState, **values: Any
) -> None:
    """Change an experiment's state, and other columns with it.

    Raises:
        ConflictError: If the transition is not legal.
    """
    if experiment["state"] != state:
        name = f"experiment {experiment['id']}"
        check_move(EXPERIMENT_MOVES, name, experiment["state"], state)
    save(transaction, experiments, experiment["id"], state=state, **values)
    touch(transaction, "experiment", experiment["id"], experiment["id"])


def settle_experiment(world: World, transaction: Transaction, experiment_id: int) -> None:
    """End an experiment whose trials have all ended and that wants no more."""
    experiment = find(transaction, experiments, experiment_id)
    if experiment["state"] in EXPERIMENT_ENDED:
        return
    counted = transaction.connection.execute(
        select(trials.c.state, func.count().label("number"))
        .where(trials.c.experiment_id == experiment_id)
        .group_by(trials.c.state)
    )
    counts = {row.state: row.number for row in counted}
    if any(state not in TRIAL_ENDED for state in counts):
        return
    stopping = experiment["state"] in EXPERIMENT_STOPPING
    if not (stopping or experiment["searcher_done"]):
        return
    apply_to_experiment(world, transaction, experiment_id)
    now = world.clock()
    if experiment["state"] in {ExperimentState.STOPPING_CANCELED, ExperimentState.STOPPING_KILLED}:
        move_experiment(transaction, experiment, ExperimentState.CANCELED, ended_at=now)
    elif experiment["state"] == ExperimentState.STOPPING_ERROR:
        move_experiment(transaction, experiment, ExperimentState.ERROR, ended_at=now)
    elif set(counts) == {TrialState.ERROR}:
        move_experiment(transaction, experiment, ExperimentState.STOPPING_ERROR)
        error = _last_error(transaction, experiment_id)
        stopped = find(transaction, experiments, experiment_id)
        move_experiment(transaction, stopped, ExperimentState.ERROR, ended_at=now, error=error)
    elif set(counts) == {TrialState.CANCELED}:
        move_experiment(transaction, experiment, ExperimentState.STOPPING_CANCELED)
        stopped = find(transaction, experiments, experiment_id)
        move_experiment(transaction, stopped, ExperimentState.CANCELED, ended_at=now)
    else:
        if experiment["state"] != ExperimentState.STOPPING_COMPLETED:
            move_experiment(transaction, experiment, ExperimentState.STOPPING_COMPLETED)
        stopped = find(transaction, experiments, experiment_id)
        fruitless = stopped["best_validation"] is None
        move_experiment(
            transaction, stopped, ExperimentState.COMPLETED, ended_at=now, progress=1.0,
            error=_last_error(transaction, experiment_id) if fruitless else None,
        )  # fmt: skip
    world.searchers.pop(experiment_id, None)
    world.configs.pop(experiment_id, None)


def _last_error(transaction: Transaction, experiment_id: int) -> str | None:
    query = (
        select(trials.c.error)
        .where(trials.c.experiment_id == experiment_id, trials.c.error.is_not(None))
        .order_by(trials.c.ended_at.desc(), trials.c.id.desc())
        .limit(1)
    )
    error: str | None = transaction.connection.scalar(query)
    return error
