"""The JSON resources of the REST API, each declared once.

The OpenAPI document, the types of the web page (``server/web/src/resources.ts``) and the tables of
``docs/rest.md`` are made from these structs: ``python -m zeroserver.api.generate`` writes the
latter two. A field that is named like a column is read from it.
"""

from typing import Any, Literal

from zeroserver.api.rows import Num, Resource, Share, Time
from zeroserver.states import ExperimentState, TrialState

__all__ = [
    "Agent",
    "AgentPage",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
    "Cluster",
    "Curve",
    "ErrorAnswer",
    "ErrorBody",
    "Experiment",
    "ExperimentAnswer",
    "ExperimentPage",
    "Health",
    "Info",
    "Job",
    "JobPage",
    "Log",
    "LogPage",
    "LoginLink",
    "MetricName",
    "MetricNames",
    "Metrics",
    "Slot",
    "Token",
    "Trial",
    "TrialAnswer",
    "TrialPage",
]


class ErrorBody(Resource, frozen=True):
    """What went wrong."""

    type: str
    message: str
    problems: list[str]


class ErrorAnswer(Resource, frozen=True):
    """Body of every answer of 400 and above."""

    error: ErrorBody


class Experiment(Resource, frozen=True):
    """One config file's run: a searcher and its trials."""

    id: int
    """Number, from 1."""
    name: str
    """Can be changed."""
    description: str
    """Can be changed."""
    labels: list[str]
    """Can be changed."""
    notes: str
    """Can be changed."""
    state: ExperimentState
    """Where it stands; `COMPLETED`, `CANCELED` and `ERROR` are for good."""
    config: dict[str, Any]
    """The whole configuration, defaults filled in, with the seed that was chosen."""
    progress: Share
    """0 to 1."""
    created_at: Time
    """When it was submitted."""
    started_at: Time | None
    """When its first run began."""
    ended_at: Time | None
    """When it ended."""
    archived: bool
    """Set aside."""
    test_mode: bool
    """Submitted with `test`."""
    forked_from: int | None
    """Id of the original."""
    searcher_name: str
    """How trials are chosen."""
    metric: str
    """By which validation metric they are compared."""
    smaller_is_better: bool
    """Which way they are compared."""
    num_trials: int
    """How many there are by now."""
    best_trial_id: int | None
    """The best trial by now."""
    best_validation: Num | None
    """Its metric."""
    waiting_reason: str | None
    """Why none of its trials runs, while it is `ACTIVE`; else null."""
    error: str | None
    """One line, when the state is `ERROR` or no trial has a result; the logs have the traceback."""
    result_problem: str | None
    """Why it ended without a result, also when it is `COMPLETED`: every trial failed, or none
    reported a number for the metric; else null."""


class Trial(Resource, frozen=True):
    """One choice of hyperparameters."""

    id: int
    """Number, from 1, over all experiments."""
    experiment_id: int
    """Whose trial it is."""
    state: TrialState
    """Where it stands. `PAUSED`: it gave its slots back and waits."""
    hparams: dict[str, Any]
    """What the searcher chose."""
    seed: int
    """What the searcher chose."""
    restarts: int
    """How often it has failed and been started again."""
    steps_completed: int
    """Batches."""
    progress: Share
    """0 to 1."""
    activity: str | None
    """What its run is doing: `starting`, `training`, `validating`, `checkpointing`."""
    waiting_reason: str | None
    """Why it has no slots, while it is `QUEUED`; else null."""
    labels: list[str]
    """Names of the log policies that have matched its log."""
    best_validation: Num | None
    """Best value of the searcher's metric."""
    best_steps: int | None
    """The batch of that validation."""
    latest_validation: Num | None
    """Latest value of the searcher's metric."""
    latest_checkpoint: str | None
    """A uuid."""
    best_checkpoint: str | None
    """A uuid."""
    run_id: int | None
    """The run that holds slots for it now."""
    created_at: Time
    """When the searcher asked for it."""
    started_at: Time | None
    """When its first run began."""
    ended_at: Time | None
    """When it ended."""
    error: str | None
    """One line for the user."""
    result_problem: str | None
    """Why it ended without a result, also when it is `COMPLETED` (no validation, or never a
    number); else null."""


class Checkpoint(Resource, frozen=True):
    """A saved state of a trial."""

    uuid: str
    """Its name."""
    trial_id: int
    """Whose state it is."""
    experiment_id: int
    """Whose trial that is."""
    run_id: int | None
    """The run that saved it."""
    steps_completed: int
    """Batches that the trial had trained."""
    state: Literal["COMPLETED", "DELETED", "ERROR"]
    """Whether its files are there."""
    size_bytes: int
    """Of all its files."""
    resources: dict[str, int]
    """File to bytes."""
    metadata: dict[str, Any]
    """What was saved with it."""
    metrics: dict[str, Num] | None
    """Validation metrics at that step."""
    created_at: Time | None
    """When it was complete."""
    path: str
    """Its directory."""


class Log(Resource, frozen=True):
    """One line of a log."""

    id: int
    """Number; lines come in the order in which they arrived."""
    trial_id: int | None
    """Whose line it is."""
    run_id: int | None
    """Of which run."""
    rank: int | None
    """Who wrote it; null for the agent and the server."""
    stream: Literal["stdout", "stderr", "agent", "server"]
    """Where it was written."""
    level: str | None
    """`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL` where it is known."""
    text: str
    """The line."""
    time: Time | None
    """When it was written."""


class MetricName(Resource, frozen=True):
    """A metric that a trial has reported."""

    group: str
    name: str


class MetricNames(Resource, frozen=True):
    """Answer of ``metric-names``."""

    names: list[MetricName]


class Curve(Resource, frozen=True):
    """A metric over the steps."""

    group: str
    """`training`, `validation` or `system`."""
    name: str
    """Of the metric."""
    points: list[tuple[int, Num]]
    """Step and value; the mean of its neighbours where points were merged."""
    band: list[tuple[int, Num, Num, Num]] | None
    """Step, minimum, maximum and mean of the points that were merged; null when none were."""


class Metrics(Resource, frozen=True):
    """Answer of ``metrics``."""

    metrics: list[Curve]


class Slot(Resource, frozen=True):
    """A device of an agent."""

    id: int
    """Number, from 0, on its agent."""
    device: str
    """`cpu`, or `cuda:0 NAME`."""
    run_id: int | None
    """The run that holds it."""


class Agent(Resource, frozen=True):
    """A machine that offers slots."""

    id: int
    """Number, from 1."""
    name: str
    """The same name is the same agent."""
    host: str
    """Name of the machine."""
    alive: bool
    """Whether it asks for work."""
    slots: list[Slot]
    """Its devices: `id`, `device`, and `run_id` of the run that holds it."""
    registered_at: Time
    """When it registered, the last time."""


class Job(Resource, frozen=True):
    """An experiment in the queue."""

    experiment_id: int
    """Which one."""
    name: str
    """Its name."""
    state: ExperimentState
    """Where it stands."""
    priority: int | None
    """The smallest is the first to run."""
    weight: float
    """Its share of the slots."""
    slots_per_trial: int
    """What one trial of it needs."""
    running_trials: int
    """Those that hold slots."""
    queued_trials: int
    """Those that wait for slots."""
    held_slots: int
    """Slots that its runs hold."""
    waiting_reason: str | None
    """Why none of its trials runs, while it is `ACTIVE`; else null."""
    created_at: Time
    """When it was submitted."""


class Cluster(Resource, frozen=True):
    """What there is to run on."""

    agents: int
    slots: int
    free_slots: int


class Info(Resource, frozen=True):
    """What this server is."""

    version: str
    home: str
    database: Literal["sqlite", "postgresql"]
    started_at: Time
    cluster: Cluster


class LoginLink(Resource, frozen=True):
    """A link that opens the page once."""

    url: str


class Token(Resource, frozen=True):
    """The owner's token."""

    token: str


class Health(Resource, frozen=True):
    """The server is up and its database answers."""

    status: Literal["ok"]


class ExperimentAnswer(Resource, frozen=True):
    """One experiment."""

    experiment: Experiment


class TrialAnswer(Resource, frozen=True):
    """One trial."""

    trial: Trial


class CheckpointAnswer(Resource, frozen=True):
    """One checkpoint."""

    checkpoint: Checkpoint


class ExperimentPage(Resource, frozen=True):
    """A page of experiments."""

    experiments: list[Experiment]
    next_after: str | None


class TrialPage(Resource, frozen=True):
    """A page of trials."""

    trials: list[Trial]
    next_after: str | None


class CheckpointPage(Resource, frozen=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_after: str | None


class LogPage(Resource, frozen=True):
    """A page of log lines."""

    logs: list[Log]
    next_after: int | None


class AgentPage(Resource, frozen=True):
    """All agents."""

    agents: list[Agent]
    next_after: None = None


class JobPage(Resource, frozen=True):
    """The queue, the first to run first."""

    jobs: list[Job]
    next_after: None = None
