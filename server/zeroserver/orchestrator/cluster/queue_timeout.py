"""Queue timeout (``resources.queue_time``): end experiments that wait too long for slots."""

from sqlalchemy import ColumnElement, RowMapping, and_, exists, or_, select, text

from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS
from zeroserver.orchestrator.trials import fail_experiment
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.states import ExperimentState
from zeroserver.store.schema import WAITING, experiments, runs, trials

__all__ = ["end_long_waits"]


def end_long_waits(work: UnitOfWork) -> bool:
    """End the experiments of which trials have waited for slots too long, and none has run.

    The wait begins when a trial is queued and none of the experiment's holds slots. A pause is no
    wait, nor is the moment before a trial that failed is started again.

    Returns:
        Whether one has ended. Why it waited is what the last round of the scheduler has found.
    """
    ended = False
    now = work.steady()
    limited = select(experiments).where(
        experiments.c.queue_time.is_not(None),
        experiments.c.state.in_([ExperimentState.ACTIVE, ExperimentState.PAUSED]),
    )
    rows = work.connection.execute(limited.add_columns(_waits(now).label("waits")))
    for row in rows.mappings().all():
        since = row["waits_since"]
        if not row["waits"]:
            if since is not None:
                work.save(experiments, row["id"], waits_since=None)
        elif since is None:
            work.save(experiments, row["id"], waits_since=now)
        elif now - since > row["queue_time"]:
            _end(work, row)
            ended = True
    return ended


def _waits(now: float) -> ColumnElement[bool]:
    due = or_(trials.c.restart_at.is_(None), trials.c.restart_at <= now)
    queued = exists().where(
        trials.c.experiment_id == experiments.c.id,
        text(WAITING),
        due,
    )
    holding = exists().where(runs.c.experiment_id == experiments.c.id, runs.c.state.in_(OPEN_RUNS))
    return and_(queued, ~holding)


def _end(work: UnitOfWork, experiment: RowMapping) -> None:
    limit = experiment["queue_time"]
    error = f"it has waited for slots for more than {limit} s (resources.queue_time)"
    why = work.orchestrator.waiting.of_job(experiment["id"], experiment["state"])
    error = f"{error}: {why}" if why else error
    fail_experiment(work, experiment["id"], error)
