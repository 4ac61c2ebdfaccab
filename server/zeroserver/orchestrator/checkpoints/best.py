"""Checkpoints sorted by their validation metric, best first."""

from typing import Any

from sqlalchemy import ScalarSelect, Select, and_, select

from zeroserver.store.rows import ExperimentRow
from zeroserver.store.schema import checkpoints, metric_keys, points

__all__ = ["best_checkpoints", "searcher_metric_at"]


def best_checkpoints(experiment: ExperimentRow) -> Select[Any]:
    """Select the complete checkpoints with a validation at their step, best first.

    The columns are those of a checkpoint and ``value``, the searcher's metric at its step. Add a
    ``where`` clause for an experiment or trial. Checkpoints with a NaN metric are excluded.
    """
    value = points.c.value.asc() if experiment.smaller_is_better else points.c.value.desc()
    return (
        select(checkpoints, points.c.value)
        .select_from(checkpoints)
        .join(points, searcher_metric_at(experiment))
        .where(checkpoints.c.state == "COMPLETED", points.c.value.is_not(None))
        .order_by(value, checkpoints.c.id)
    )


def searcher_metric_at(experiment: ExperimentRow) -> Any:
    """Return the condition that joins a checkpoint to the searcher's metric at its step."""
    return and_(
        points.c.trial_id == checkpoints.c.trial_id,
        points.c.key_id == _key(experiment.metric),
        points.c.step == checkpoints.c.steps_completed,
    )


def _key(metric: str) -> "ScalarSelect[int]":
    return (
        select(metric_keys.c.id)
        .where(metric_keys.c.group_name == "validation", metric_keys.c.name == metric)
        .scalar_subquery()
    )
