"""Reason for a missing final result of a trial or an experiment."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerolab.contract.spec import TrialClass
from zeroserver.states import ExperimentState, TrialState
from zeroserver.store.rows import ExperimentRow, TrialRow

__all__ = ["TrialResult", "experiment_problem", "has_result", "missing_checkpoint", "trial_problem"]


class TrialResult(NamedTuple):
    """Columns of a trial that determine whether it has a result."""

    best_validation: float | None
    error: str | None
    searcher_steps: int
    state: str


_ERROR, _COMPLETED = str(TrialState.ERROR), str(TrialState.COMPLETED)


def experiment_problem(row: ExperimentRow) -> str | None:
    """Return why an ended experiment has no result; None if it has one or has not ended.

    Returns None for a canceled experiment, since a user ended it.
    """
    if row.state == ExperimentState.ERROR:
        return str(row.error or "it ended with an error")
    if row.state != ExperimentState.COMPLETED or row.best_validation is not None:
        return None
    if not row.metric:
        return str(row.error) if row.error else None
    problem = f"no trial reported a number for the searcher's metric {row.metric!r}"
    return f"{problem}: {row.error}" if row.error else problem


def has_result(row: TrialRow | TrialResult, metric: str) -> str | None:
    """Return "yes" or "no" for an ended trial; None if it has not ended or was canceled."""
    if row.state not in {TrialState.COMPLETED, TrialState.ERROR}:
        return None
    return "yes" if trial_problem(row, metric) is None else "no"


def trial_problem(row: TrialRow | TrialResult, metric: str) -> str | None:
    """Return why an ended trial has no result; None if it has one or has not ended.

    Args:
        row: Row of the trial.
        metric: The searcher's metric; empty if no validation is expected.
    """
    state = row.state
    if state == _ERROR:
        return str(row.error or "it ended with an error")
    if state != _COMPLETED:
        return None
    if row.error:
        return str(row.error)
    if row.best_validation is not None or not metric:
        return None
    if row.searcher_steps < 0:
        return "it ended without a validation"
    return "no validation gave the searcher's metric a number"


def missing_checkpoint(config: Mapping[str, Any], trial: TrialRow, *, deleted: bool) -> str:
    """Return the message for a best validation without a checkpoint, with its remedy.

    Args:
        config: Configuration of the experiment with defaults.
        trial: Trial that has a best validation.
        deleted: Whether its checkpoint was saved and deleted.
    """
    from zerolab.config.experiment.entrypoint import parse_entrypoint  # rarely needed

    metric = config["searcher"]["metric"]
    problem = (
        f"the best validation ({metric} {trial.best_validation:.6g} at batch "
        f"{trial.best_steps} of trial {trial.id}) has no checkpoint"
    )
    if deleted:
        keep = "raise checkpoint_storage.save_trial_best or save_experiment_best to keep more"
        return f"{problem}: it was deleted; {keep}"
    if isinstance(parse_entrypoint(config["entrypoint"]), TrialClass):
        if config["checkpoint_policy"] == "none":
            return (
                f"{problem}; set checkpoint_policy: best to save one after each new best validation"
            )
        return f"{problem}: its run ended before one was saved"
    return (
        f"{problem}; to keep the best weights, the script must save a checkpoint after each new "
        "best validation"
    )
