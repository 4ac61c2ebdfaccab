"""Route that estimates a search's trials and cost (dry run)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, func, select

from zerolab.contract.secrets import replace_masks
from zerolab.errors import ConfigError
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.analysis.cost import count_host_slots
from zeroserver.api.common import MAX_ID
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.services import ServicesDep
from zeroserver.store.rows import ExperimentRow, find_row, read_rows
from zeroserver.store.schema import experiments, metric_keys, points, runs, trials

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["PreviewAnswer", "PreviewLength", "SearchPreview", "router"]

router = resource_router("/api/v1/experiments", "search")

ACCESS["POST /api/v1/experiments/preview"] = VIEWER

_MAX_CANDIDATES = 100
"""Maximum number of experiments searched for a similar one."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PreviewLength(Resource, frozen=True):
    """Trials that end at one length."""

    length: int
    """Length in the unit of the search."""
    trials: int
    """Number of trials that end there."""


class SearchPreview(Resource, frozen=True):
    """Estimate of a search's trials and cost."""

    outline: str
    """Short summary."""
    trials: int | None
    """Number of trials; null if the searcher does not know it."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; null if trials decide their lengths."""
    lengths: list[PreviewLength]
    """Expected numbers of trials by final length."""
    total_length: int | None
    """Expected sum over all trials; null if unknown."""
    most_length: int | None
    """Maximum sum over all trials; null if unknown."""
    slots_per_trial: int
    """Slots that each trial holds while it trains."""
    seconds_per_unit: float | None
    """Time of one batch or one epoch; null if unknown."""
    like: int | None
    """Experiment from which this time was taken; null if it was given."""
    slot_hours: float | None
    """Slot hours of all trials for `total_length`; null if a time or length is unknown."""
    most_slot_hours: float | None
    """Slot hours of all trials for `most_length`; null if unknown."""
    premise: str | None
    """Assumption of the estimate; null if it is exact or unknown."""
    warnings: list[str]
    """Probable mistakes of the search, one line each."""


class PreviewAnswer(Resource, frozen=True):
    """Estimate of a search's trials and cost."""

    preview: SearchPreview


class PreviewOf(BaseModel):
    """Search to estimate, and the duration of a batch or an epoch."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any]
    """Content of the experiment file."""
    seconds_per_batch: Seconds | None = None
    """Duration of a batch, for a search in batches."""
    seconds_per_epoch: Seconds | None = None
    """Duration of an epoch, for a search in epochs."""
    like: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    """Experiment whose trials took as long. Default without a duration: the newest experiment with
    the same entrypoint and slots."""


@router.post("/preview")
async def preview_search(services: ServicesDep, request: PreviewOf) -> PreviewAnswer:
    """Estimate the trials of a search, their lengths and their cost (dry run)."""

    def read(connection: Connection) -> PreviewAnswer:
        # Imported here, since startup does not need the configuration.
        from zerolab.config.experiment.experiment_config import load_experiment
        from zeroserver.extensions.search_preview.estimate import estimate_search

        config = load_experiment(replace_masks(request.config, "masked"))
        like, seconds = None, None
        if request.seconds_per_batch is None and request.seconds_per_epoch is None:
            like = _alike(connection, request.like, config)
            if like is not None:
                now = services.orchestrator.clock()
                seconds = _seconds(connection, like.id, config.searcher.unit, now)
            if request.like is not None and seconds is None:
                problem = (
                    f"like: must have trained before, got experiment {request.like}, which has not"
                )
                raise ConfigError("preview", [problem])
        times = {
            "seconds_per_batch": request.seconds_per_batch,
            "seconds_per_epoch": request.seconds_per_epoch,
        }
        if like is not None and seconds is not None:
            is_epochs = config.searcher.unit == "epochs"
            times = {"seconds_per_epoch" if is_epochs else "seconds_per_batch": seconds}
            if (
                config.resources.hostfile and like.host_slots != "[]"
            ):  # the hostfile's content is not known here
                slots = count_host_slots(like.host_slots)
                resources = config.resources.model_copy(update={"slots_per_trial": slots})
                config = config.model_copy(update={"resources": resources})
        result = estimate_search(
            config, **times, like=like.id if like is not None and seconds else None
        )
        lengths = [
            PreviewLength(length, number) for length, number in sorted(result.lengths.items())
        ]
        return PreviewAnswer(
                SearchPreview(
                    result.outline, result.trials, result.unit, lengths, result.total_length,
                    result.most_length, result.slots, result.seconds_per_unit, result.like,
                    result.slot_hours, result.most_slot_hours, result.premise,
                    list(result.warnings),
                )
            )  # fmt: skip

    return await services.read(read)


def _alike(
    connection: Connection, like: int | None, config: "ExperimentConfig"
) -> ExperimentRow | None:
    """Return the named experiment, or the newest with the same entrypoint and slots."""
    if like is not None:
        return find_row(connection, ExperimentRow, like)
    requested = config.to_dict()
    slots = 1 if config.resources.hostfile else config.resources.slots_per_trial
    query = (
        select(experiments)
        .where(experiments.c.slots == slots, experiments.c.started_at.is_not(None))
        .order_by(experiments.c.id.desc())
        .limit(_MAX_CANDIDATES)
    )
    for row in read_rows(connection, ExperimentRow, query):
        stored = msgspec.json.decode(row.config)
        same_entry = stored.get("entrypoint") == requested["entrypoint"]
        if same_entry and _hosts(stored) == _hosts(requested):
            return row
    return None


def _hosts(config: Mapping[str, Any]) -> list[Any]:
    """Return the settings that select the machines of a hostfile."""
    resources = config.get("resources", {})
    return [resources.get(key) or None for key in ("hostfile", "include", "exclude")]


def _seconds(
    connection: Connection, experiment_id: int, unit: str | None, now: float
) -> float | None:
    """Return the seconds per batch or epoch of an experiment's trials; None if unknown."""
    used = func.sum(func.coalesce(runs.c.ended_at, now) - runs.c.started_at)
    query = select(used).where(
        runs.c.experiment_id == experiment_id, runs.c.started_at.is_not(None)
    )
    seconds = connection.scalar(query)
    done = (
        _epochs(connection, experiment_id)
        if unit == "epochs"
        else _batches(connection, experiment_id)
    )
    return float(seconds) / done if unit and seconds and done else None


def _batches(connection: Connection, experiment_id: int) -> float:
    query = select(func.sum(trials.c.steps_completed)).where(
        trials.c.experiment_id == experiment_id
    )
    return float(connection.scalar(query) or 0)


def _epochs(connection: Connection, experiment_id: int) -> float:
    """Return the sum of the trials' epochs at their last validations."""
    key = select(metric_keys.c.id).where(
        metric_keys.c.group_name == "validation", metric_keys.c.name == "epochs"
    )
    furthest = (
        select(func.max(points.c.value).label("epochs"))
        .join(trials, trials.c.id == points.c.trial_id)
        .where(trials.c.experiment_id == experiment_id, points.c.key_id == key.scalar_subquery())
        .group_by(points.c.trial_id)
        .subquery()
    )
    return float(connection.scalar(select(func.sum(furthest.c.epochs))) or 0)
