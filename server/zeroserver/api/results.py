"""Why something that has ended has no result that its user could go on with."""

from zeroserver.orchestrator.desk import Fields
from zeroserver.states import ExperimentState, TrialState

__all__ = ["experiment_problem", "trial_problem"]


def experiment_problem(row: Fields) -> str | None:
    """Say why an experiment that has ended has no result; None if it has one, or goes on.

    An experiment that was canceled has been ended by its user: that is no problem.
    """
    if row["state"] == ExperimentState.ERROR:
        return str(row["error"] or "it ended with an error")
    if row["state"] != ExperimentState.COMPLETED or row["best_validation"] is not None:
        return None
    what = f"no trial reported a number for the searcher's metric {row['metric']!r}"
    return f"{what}: {row['error']}" if row["error"] else what


def trial_problem(row: Fields) -> str | None:
    """Say why a trial that has ended has no result; None if it has one, or goes on."""
    if row["state"] == TrialState.ERROR:
        return str(row["error"] or "it ended with an error")
    if row["state"] != TrialState.COMPLETED:
        return None
    if row["error"]:
        return str(row["error"])
    if row["best_validation"] is not None:
        return None
    if row["searcher_steps"] < 0:
        return "it ended without a validation"
    return "no validation gave the searcher's metric a number"
