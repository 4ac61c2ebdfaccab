"""Validations: update of the best value, and events for the searcher."""

from typing import Any

from sqlalchemy import RowMapping

from zerolab.contract.messages import MetricsRecord
from zeroserver.orchestrator.ingest.sender import Reporting
from zeroserver.orchestrator.ingest.values import stored_number
from zeroserver.orchestrator.runs import no_metric_at
from zeroserver.orchestrator.searching import Event
from zeroserver.orchestrator.state import (
    Fields,
)
from zeroserver.orchestrator.trials import direct_run, stop_trial, tell_searcher
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.states import TRIAL_ENDED, ExperimentState
from zeroserver.store.schema import experiments, trials

__all__ = ["best_of", "validated"]

_SEARCHING = {ExperimentState.ACTIVE, ExperimentState.PAUSED}


def validated(work: UnitOfWork, run: Reporting, record: MetricsRecord) -> bool:
    """Store what a validation says of its trial, and tell the searcher; return whether it acts."""
    experiment = work.experiment_of(run)
    trial = work.trial_of(run)
    metric = experiment["metric"]
    if not metric:  # a single trial that is compared with none
        return False
    value: float | None = None
    if metric in record.values:
        before = None
        if trial["best_validation"] is not None:
            before = (trial["best_validation"], trial["best_steps"])
        value, best = best_of(experiment, record, before)
        changes: dict[str, Any] = {"latest_validation": value}
        if best is not None:
            changes |= {"best_validation": best[0], "best_steps": best[1]}
        work.save(trials, trial["id"], **changes)
        if value is not None and _better(experiment, value, experiment["best_validation"]):
            winner = {"best_validation": value, "best_trial_id": trial["id"]}
            work.save(experiments, experiment["id"], **winner)
            work.touch("experiment", experiment["id"], experiment["id"])
    done = trial["stop"] is not None or trial["state"] in TRIAL_ENDED
    again = record.steps <= trial["searcher_steps"]  # a restarted trial repeats itself
    if done or again or experiment["state"] not in _SEARCHING:
        return False
    length = _length(work, experiment, record)
    if metric not in record.values or isinstance(length, str):
        problem = length if isinstance(length, str) else _missing(metric, record)
        compared = length in work.config(experiment["id"]).searcher.validate_at()
        if compared and not isinstance(length, str):
            problem = f"{no_metric_at(length, metric)}; {_there_are(record)}"
        # Any other one is left out, if there was one before: the searcher waits for the next.
        if compared or trial["searcher_steps"] < 0:
            work.log_line(run, problem, "ERROR")
            work.save(trials, trial["id"], error=problem)
            stop_trial(work, trial, "error")
        return False
    work.save(trials, trial["id"], searcher_steps=record.steps)
    event = Event("validated", trial["request_id"], value, length)
    acts = tell_searcher(work, experiment["id"], event)
    _pause_if_due(work, run, length)
    return acts


def _pause_if_due(work: UnitOfWork, run: Reporting, length: float) -> None:
    """Have a trial that the searcher has let go no further give its slots back."""
    trial = work.trial_of(run)
    if trial["stop"] is None and trial["until"] is not None and length >= trial["until"]:
        work.save(trials, trial["id"], waits=1)
        direct_run(work, run["id"], "preempt")


def _missing(metric: str, record: MetricsRecord) -> str:
    there = _there_are(record)
    return f"searcher.metric: must be one of the validation metrics, got {metric!r}; {there}"


def _there_are(record: MetricsRecord) -> str:
    names = ", ".join(sorted(set(record.values) - {"batches", "epochs"})) or "none"
    return f"there are: {names}"[:1800]


def _length(work: UnitOfWork, experiment: RowMapping, record: MetricsRecord) -> float | str:
    """How far the trial is, in the searcher's unit; what is wrong where nobody can say."""
    searcher = work.config(experiment["id"]).searcher
    if searcher.unit != "epochs":
        return float(record.steps)
    if "epochs" in record.values:
        return stored_number("epochs", record.values["epochs"]) or 0.0
    if not searcher.validate_at():
        return 0.0  # nothing depends on it but progress
    return "epochs: must be among the validation metrics, for the searcher counts in them"


def best_of(
    experiment: Fields, record: MetricsRecord, best: tuple[float, int] | None
) -> tuple[float | None, tuple[float, int] | None]:
    """Return the searcher's metric of a validation, and the best value with its step so far."""
    value = stored_number(experiment["metric"], record.values[experiment["metric"]])
    if value is not None and _better(experiment, value, best[0] if best else None):
        best = (value, record.steps)
    return value, best


def _better(experiment: Fields, value: float, best: float | None) -> bool:
    if best is None:
        return True
    return value < best if experiment["smaller_is_better"] else value > best
