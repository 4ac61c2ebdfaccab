"""Sender of a report: a run that may report, and its trial."""

from typing import TypedDict

from zeroserver.orchestrator.runs import current_run
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.states import RunState

__all__ = ["Reporting", "reporting_run"]


class Reporting(TypedDict):
    """What storing a report needs to know of its run and trial."""

    id: int
    trial_id: int
    experiment_id: int
    last_seq: int
    steps_completed: int


def reporting_run(work: UnitOfWork, run_id: int) -> Reporting:
    """Return a run that may report.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If the run has ended, or another run has taken over.
    """
    rows = work.raw(
        "SELECT r.trial_id, r.experiment_id, r.last_seq, t.steps_completed FROM runs r "
        "JOIN trials t ON t.id = r.trial_id AND t.run_id = r.id WHERE r.id = ? AND r.state <> ?",
        (run_id, str(RunState.EXITED)),
    )
    if not rows:
        current_run(work, run_id)  # says why
    trial_id, experiment_id, last_seq, steps = rows[0]
    return Reporting(
        id=run_id,
        trial_id=trial_id,
        experiment_id=experiment_id,
        last_seq=last_seq,
        steps_completed=steps,
    )
