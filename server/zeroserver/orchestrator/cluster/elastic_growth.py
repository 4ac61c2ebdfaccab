"""Growth of elastic trials that run on fewer slots than requested.

A run cannot take slots while it trains: at a checkpoint it is asked to leave, and its trial starts
again with more. That costs time, and what is free now may be taken a moment later. So a run must
have lasted for a while, and for twice as long each time that its trial has done so before.
"""

import msgspec
from sqlalchemy import func, select

from zerolab.contract.spec import RunSpec
from zeroserver.orchestrator.cluster.scheduler_input import held_by_run, jobs_of
from zeroserver.orchestrator.scheduling import slots_instead
from zeroserver.orchestrator.trials import direct_run
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.store.schema import runs

__all__ = ["grow"]


def grow(work: UnitOfWork, run_id: int, steps: int) -> None:
    """Ask a run that has saved a checkpoint to leave, if its trial would have more slots at once.

    Args:
        work: Unit of work.
        run_id: The run.
        steps: Batches that the checkpoint holds.
    """
    run = work.find(runs, run_id)
    if run["directive"] != "train" or run["killed"] or run["started_at"] is None:
        return
    home = run["experiment_id"]
    if not jobs_of(work, [home])[home].fewer:
        return
    mine = held_by_run(work)[run_id]
    holds = sum(map(len, mine.slots.values()))
    lasted = work.clock() - run["started_at"]
    if holds >= mine.job.slots or lasted < _pause(work, run["trial_id"]):
        return
    length = msgspec.json.decode(run["spec"], type=RunSpec).max_batches
    if length is not None and steps >= length:
        return
    found = slots_instead(work, run, work.trial_of(run))
    if found <= holds:
        return
    work.save(runs, run_id, grows_to=found)
    direct_run(work, run_id, "preempt")
    wanted = f"{holds} of the {mine.job.slots} slots of its trial, and {found} are free for it"
    text = f"run {run_id} has {wanted}: it leaves with its checkpoint, and the trial starts again"
    work.log_line(run, f"{text} with {found}, not counted as a restart")


def _pause(work: UnitOfWork, trial_id: int) -> float:
    """Seconds that a run of a trial must have lasted."""
    query = select(func.count()).where(runs.c.trial_id == trial_id, runs.c.grows_to.is_not(None))
    before = int(work.connection.execute(query).scalar_one())
    timings = work.settings.timings
    return min(timings.grow_first_s * 2.0 ** min(before, 32), timings.grow_most_s)
