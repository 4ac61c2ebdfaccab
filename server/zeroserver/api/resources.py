"""The JSON resources of the REST API: models for OpenAPI, plain dictionaries for output."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import RowMapping

from zerolab.contract.wire import wire_number
from zeroserver.api.results import experiment_problem, trial_problem
from zeroserver.orchestrator.waiting import Waiting

__all__ = [
    "Agent",
    "AgentPage",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
    "Curve",
    "ErrorAnswer",
    "Experiment",
    "ExperimentAnswer",
    "ExperimentPage",
    "Info",
    "Job",
    "JobPage",
    "Log",
    "LogPage",
    "LoginLink",
    "MetricName",
    "MetricNames",
    "Metrics",
    "Number",
    "Trial",
    "TrialAnswer",
    "TrialPage",
    "iso",
    "respond",
]

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""JSON has no number that is not finite; those travel as text."""


def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, ending in Z; times that no calendar has as None."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Resource(BaseModel):
    """Base of all resources."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(Resource):
    """What went wrong."""

    type: str
    message: str
    problems: list[str]


class ErrorAnswer(Resource):
    """Body of every answer of 400 and above."""

    error: ErrorBody


class Experiment(Resource):
    """One config file's run: a searcher and its trials."""

    id: int
    name: str
    description: str
    labels: list[str]
    notes: str
    state: str
    config: dict[str, Any]
    progress: Annotated[float, Field(ge=0, le=1)]
    created_at: str
    started_at: str | None
    ended_at: str | None
    archived: bool
    test_mode: bool
    forked_from: int | None
    searcher_name: str
    metric: str
    smaller_is_better: bool
    num_trials: int
    best_trial_id: int | None
    best_validation: Number | None
    waiting_reason: str | None
    """Why none of its trials runs, while it is ACTIVE."""
    error: str | None
    result_problem: str | None
    """Why it has ended without a result; None when it has one, goes on, or was canceled."""

    @staticmethod
    def of(row: RowMapping, waiting: Waiting) -> dict[str, Any]:
        """Read a row of the table; ``waiting`` knows why it waits."""
        return {
            "id": row["id"],
            "name": row["name"],
            "description": row["description"],
            "labels": _raw(row["labels"]),
            "notes": row["notes"],
            "state": row["state"],
            "config": _raw(row["config"]),
            "progress": row["progress"],
            "created_at": iso(row["created_at"]),
            "started_at": iso(row["started_at"]),
            "ended_at": iso(row["ended_at"]),
            "archived": bool(row["archived"]),
            "test_mode": bool(row["test_mode"]),
            "forked_from": row["forked_from"],
            "searcher_name": row["searcher_name"],
            "metric": row["metric"],
            "smaller_is_better": bool(row["smaller_is_better"]),
            "num_trials": row["num_trials"],
            "best_trial_id": row["best_trial_id"],
            "best_validation": _number(row["best_validation"]),
            "waiting_reason": waiting.of_experiment(row["id"], row["state"]),
            "error": row["error"],
            "result_problem": experiment_problem(row),
        }


class Trial(Resource):
    """One choice of hyperparameters."""

    id: int
    experiment_id: int
    state: str
    hparams: dict[str, Any]
    seed: int
    restarts: int
    steps_completed: int
    progress: Annotated[float, Field(ge=0, le=1)]
    activity: str | None
    """What its run is doing: starting, training, validating, checkpointing."""
    waiting_reason: str | None
    """Why it has no slots, while it is QUEUED."""
    labels: list[str]
    """Names of the log policies that matched its log."""
    best_validation: Number | None
    best_steps: int | None
    latest_validation: Number | None
    latest_checkpoint: str | None
    best_checkpoint: str | None
    run_id: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    error: str | None
    result_problem: str | None
    """Why it has ended without a result; None when it has one, goes on, or was canceled."""

    @staticmethod
    def of(row: RowMapping, waiting: Waiting) -> dict[str, Any]:
        """Read a row of the table; ``waiting`` knows why it waits."""
        return {
            "id": row["id"],
            "experiment_id": row["experiment_id"],
            "state": row["state"],
            "hparams": _raw(row["hparams"]),
            "seed": row["seed"],
            "restarts": row["restarts"],
            "steps_completed": row["steps_completed"],
            "progress": row["progress"],
            "activity": row["activity"],
            "waiting_reason": waiting.of_trial(row["id"], row["state"], row["run_id"]),
            "labels": _raw(row["labels"]),
            "best_validation": _number(row["best_validation"]),
            "best_steps": row["best_steps"],
            "latest_validation": _number(row["latest_validation"]),
            "latest_checkpoint": row["latest_checkpoint"],
            "best_checkpoint": row["best_checkpoint"],
            "run_id": row["run_id"],
            "created_at": iso(row["created_at"]),
            "started_at": iso(row["started_at"]),
            "ended_at": iso(row["ended_at"]),
            "error": row["error"],
            "result_problem": trial_problem(row),
        }


class Checkpoint(Resource):
    """A saved state of a trial."""

    uuid: str
    trial_id: int
    experiment_id: int
    run_id: int | None
    steps_completed: int
    state: Literal["COMPLETED", "DELETED", "ERROR"]
    size_bytes: int
    resources: dict[str, int]
    metadata: dict[str, Any]
    metrics: dict[str, Number] | None
    """Validation metrics at that step."""
    created_at: str | None
    path: str

    @staticmethod
    def of(row: RowMapping, metrics: dict[str, float | str] | None) -> dict[str, Any]:
        """Read a row of the table."""
        return {
            "uuid": row["uuid"],
            "trial_id": row["trial_id"],
            "experiment_id": row["experiment_id"],
            "run_id": row["run_id"],
            "steps_completed": row["steps_completed"],
            "state": row["state"],
            "size_bytes": row["size_bytes"],
            "resources": _raw(row["resources"]),
            "metadata": _raw(row["metadata"]),
            "metrics": metrics,
            "created_at": iso(row["created_at"]),
            "path": row["path"],
        }


class Log(Resource):
    """One line of a log."""

    id: int
    trial_id: int | None
    run_id: int | None
    rank: int | None
    stream: Literal["stdout", "stderr", "agent", "server"]
    level: str | None
    text: str
    time: str | None

    @staticmethod
    def of(row: RowMapping) -> dict[str, Any]:
        """Read a row of the table."""
        return {
            "id": row["id"],
            "trial_id": row["trial_id"],
            "run_id": row["run_id"],
            "rank": row["rank"],
            "stream": row["stream"],
            "level": row["level"],
            "text": row["text"],
            "time": iso(row["time"]),
        }


class MetricName(Resource):
    """A metric that a trial has reported."""

    group: str
    name: str


class MetricNames(Resource):
    """Answer of ``metric-names``."""

    names: list[MetricName]


class Curve(Resource):
    """A metric over the steps."""

    group: str
    name: str
    points: list[tuple[int, Number]]
    band: list[tuple[int, Number, Number, Number]] | None
    """Step, minimum, maximum and mean of the points that were merged; null when none were."""


class Metrics(Resource):
    """Answer of ``metrics``."""

    metrics: list[Curve]


class Slot(Resource):
    """A device of an agent."""

    id: int
    device: str
    run_id: int | None


class Agent(Resource):
    """A machine that offers slots."""

    id: int
    name: str
    host: str
    alive: bool
    slots: list[Slot]
    registered_at: str


class Job(Resource):
    """An experiment in the queue."""

    experiment_id: int
    name: str
    state: str
    priority: int | None
    weight: float
    slots_per_trial: int
    running_trials: int
    queued_trials: int
    held_slots: int
    waiting_reason: str | None
    """Why none of its trials runs, while it is ACTIVE."""
    created_at: str


class Cluster(Resource):
    """What there is to run on."""

    agents: int
    slots: int
    free_slots: int


class Info(Resource):
    """What this server is."""

    version: str
    home: str
    database: Literal["sqlite", "postgresql"]
    started_at: str
    cluster: Cluster


class LoginLink(Resource):
    """A link that opens the page once."""

    url: str


class Health(Resource):
    """The server is up and its database answers."""

    status: Literal["ok"]


class ExperimentAnswer(Resource):
    """One experiment."""

    experiment: Experiment


class TrialAnswer(Resource):
    """One trial."""

    trial: Trial


class CheckpointAnswer(Resource):
    """One checkpoint."""

    checkpoint: Checkpoint


class ExperimentPage(Resource):
    """A page of experiments."""

    experiments: list[Experiment]
    next_after: str | None


class TrialPage(Resource):
    """A page of trials."""

    trials: list[Trial]
    next_after: str | None


class CheckpointPage(Resource):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_after: str | None


class LogPage(Resource):
    """A page of log lines."""

    logs: list[Log]
    next_after: int | None


class AgentPage(Resource):
    """All agents."""

    agents: list[Agent]
    next_after: None = None


class JobPage(Resource):
    """The queue, the first to run first."""

    jobs: list[Job]
    next_after: None = None


def _raw(text: str) -> msgspec.Raw:
    """Put JSON from the database into an answer as it is."""
    return msgspec.Raw(text.encode())


def respond(content: Any, status: int = 200) -> Response:
    """Answer with JSON that is known to fit the route's model, which tests check.

    pydantic would read all of it again: 5 ms for 100 trials, against 0.2.
    """
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _number(value: float | None) -> float | str | None:
    return None if value is None else wire_number(value)
