"""Why something that has ended has no result that its user could go on with."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping

from zeroserver.states import ExperimentState, TrialState

Fields = Mapping[str, Any] | RowMapping
"""A row of a table."""

__all__ = ["experiment_problem", "has_result", "trial_problem"]


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


def has_result(row: Fields) -> str | None:
    """Whether a trial that has ended has a result, in words; None while it goes on, or canceled."""
    if row["state"] not in {TrialState.COMPLETED, TrialState.ERROR}:
        return None
    return "yes" if trial_problem(row) is None else "no"


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
