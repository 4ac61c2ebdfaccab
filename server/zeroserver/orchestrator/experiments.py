"""State changes of experiments, including their end with the last trial."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, select

from zerolab.scheduler import HOST_SLOT
from zeroserver.orchestrator.checkpoints.retention import apply_to_experiment
from zeroserver.orchestrator.state import Fields
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_MOVES,
    EXPERIMENT_STOPPING,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
    check_move,
)
from zeroserver.store.schema import experiments, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config import ExperimentConfig

__all__ = ["move_experiment", "resource_columns", "settle_experiment"]


def resource_columns(config: "ExperimentConfig") -> dict[str, Any]:
    """Return the columns that the scheduler reads."""
    from zerolab.config.experiment.resources import fewer_slots  # pydantic

    resources, searcher = config.resources, config.searcher
    fewer = [] if resources.hosts else fewer_slots(resources)
    return {
        # Of a hostfile the slots are counted one by one; the agent only starts what runs there.
        "slots": 1 if resources.hosts else resources.slots_per_trial,
        "host_slots": msgspec.json.encode(_host_slots(resources.hosts or {})).decode(),
        "priority": resources.priority,
        "weight": resources.weight,
        "max_slots": resources.max_slots,
        "max_nodes": resources.max_nodes,
        "slots_per_rank": resources.slots_per_rank,
        "fewer_slots": msgspec.json.encode(fewer).decode(),
        "pool": resources.resource_pool,
        "queue_time": resources.queue_time,
        "log_retention_days": config.retention_policy.days,
        "concurrent_trials": 0 if searcher.has_one_trial else searcher.max_concurrent_trials,
    }


def _host_slots(hosts: Mapping[str, Sequence[int]]) -> list[str]:
    return [f"{HOST_SLOT}{host}:{slot}" for host, slots in hosts.items() for slot in slots]


def move_experiment(
    work: UnitOfWork, experiment: Fields, state: ExperimentState, **values: Any
) -> None:
    """Change an experiment's state, and other columns with it; no wait for slots outlives that.

    Raises:
        ConflictError: If the transition is not legal.
    """
    if experiment["state"] != state:
        name = f"experiment {experiment['id']}"
        check_move(EXPERIMENT_MOVES, name, experiment["state"], state)
        values["waits_since"] = None
    work.save(experiments, experiment["id"], state=state, **values)
    work.touch("experiment", experiment["id"], experiment["id"])


def settle_experiment(work: UnitOfWork, experiment_id: int) -> None:
    """End an experiment whose trials have all ended and that wants no more."""
    experiment = work.find(experiments, experiment_id)
    if experiment["state"] in EXPERIMENT_ENDED:
        return
    stopping = experiment["state"] in EXPERIMENT_STOPPING
    if not (stopping or experiment["searcher_done"]):  # before anything is counted over all trials
        return
    counted = work.connection.execute(
        select(trials.c.state, func.count().label("number"))
        .where(trials.c.experiment_id == experiment_id)
        .group_by(trials.c.state)
    )
    counts = {row.state: row.number for row in counted}
    if any(state not in TRIAL_ENDED for state in counts):
        return
    apply_to_experiment(work, experiment_id)
    through = experiment["state"] if stopping else _stopping_state(counts.keys())
    if not stopping:
        move_experiment(work, experiment, ExperimentState(through))
    end = _ENDS_AS[through]
    values: dict[str, Any] = {"ended_at": work.clock()}
    if end == ExperimentState.COMPLETED:
        values["progress"] = 1.0
        fruitless = experiment["best_validation"] is None
        values["error"] = _last_error(work, experiment_id) if fruitless else None
    elif not stopping and end == ExperimentState.ERROR:
        values["error"] = _last_error(work, experiment_id)
    move_experiment(work, {**experiment, "state": through}, end, **values)
    work.orchestrator.searchers.pop(experiment_id, None)
    work.orchestrator.forget_config(experiment_id)
    work.orchestrator.drop_jobs([experiment_id])


_ENDS_AS = {
    ExperimentState.STOPPING_CANCELED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_KILLED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_ERROR: ExperimentState.ERROR,
    ExperimentState.STOPPING_COMPLETED: ExperimentState.COMPLETED,
}


def _stopping_state(states: Collection[str]) -> ExperimentState:
    """How an experiment stops whose trials have all ended in these states."""
    if set(states) == {TrialState.ERROR}:
        return ExperimentState.STOPPING_ERROR
    if set(states) == {TrialState.CANCELED}:
        return ExperimentState.STOPPING_CANCELED
    return ExperimentState.STOPPING_COMPLETED


def _last_error(work: UnitOfWork, experiment_id: int) -> str | None:
    query = (
        select(trials.c.error)
        .where(trials.c.experiment_id == experiment_id, trials.c.error.is_not(None))
        .order_by(trials.c.ended_at.desc(), trials.c.id.desc())
        .limit(1)
    )
    error: str | None = work.connection.scalar(query)
    return error
