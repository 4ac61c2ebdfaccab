"""The JSON resources of the REST API, each declared once.

The OpenAPI document, the types of the web page (``server/web/src/resources.ts``) and the tables of
``docs/rest.md`` are made from these structs: ``python -m zeroserver.api.generate`` writes the
latter two. A field that is named like a column is read from it.
"""

from typing import Any, Literal

from zerolab.searcher.view import EntryState
from zeroserver.api.rows import Num, Resource, Share, Time
from zeroserver.states import ExperimentState, RunState, TrialState

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentPage",
    "Bracket",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
    "Cluster",
    "Curve",
    "EngineAnswer",
    "EngineEntry",
    "ErrorAnswer",
    "ErrorBody",
    "Experiment",
    "ExperimentAnswer",
    "ExperimentPage",
    "Health",
    "HparamShare",
    "Importance",
    "Improvement",
    "Info",
    "Job",
    "JobAnswer",
    "JobPage",
    "Log",
    "LogPage",
    "LoginLink",
    "MetricName",
    "MetricNames",
    "Metrics",
    "Model",
    "ModelAnswer",
    "ModelFile",
    "ModelFilePage",
    "ModelPage",
    "ModelVersion",
    "Pool",
    "PoolAnswer",
    "PoolPage",
    "PreviewAnswer",
    "PreviewLength",
    "Quota",
    "QuotaAnswer",
    "QuotaPage",
    "Removal",
    "RemovedCheckpoint",
    "Run",
    "RunPage",
    "Rung",
    "RungEntry",
    "SearchEvent",
    "SearchEvents",
    "SearchHandled",
    "SearchPreview",
    "SearchProgress",
    "SearcherAnswer",
    "SearcherState",
    "Slot",
    "SubmittedAnswer",
    "Token",
    "Trial",
    "TrialAnswer",
    "TrialColumns",
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
    source_checkpoint: str | None
    """Uuid of the checkpoint whose weights its trials begin with."""
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
    slot_seconds: float
    """What it has cost: slots times the seconds for which its runs have held them, until now."""
    latest_checkpoint: str | None
    """A uuid."""
    best_checkpoint: str | None
    """A uuid."""
    source_trial_id: int | None
    """The trial whose weights it begins with, where the searcher chose it."""
    source_checkpoint: str | None
    """Uuid of the checkpoint whose weights it begins with; empty when its source has none."""
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


class Run(Resource, frozen=True):
    """One continuous execution of a trial."""

    id: int
    """Number, from 1, over all trials."""
    trial_id: int
    """Whose run it is."""
    state: RunState
    """Where it stands."""
    agents: list[str]
    """Names of the agents whose slots it holds or held, the first with the chief; those that were
    forgotten are left out."""
    created_at: Time
    """When it was given its slots."""
    started_at: Time | None
    """When its ranks were started."""
    ended_at: Time | None
    """When it gave its slots back."""
    exit_code: int | None
    """Of its launcher; null while it runs, and where nobody learned it."""
    reason: str | None
    """Why it ended, where it did not complete."""


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
    state: Literal["COMPLETED", "PARTIAL", "DELETED", "ERROR"]
    """Whether its files are there; `PARTIAL`: some of them were removed."""
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
    """Its directory, or its URL in an object store."""


class ModelVersion(Resource, frozen=True):
    """A checkpoint of the registry."""

    version: int
    """From 1; never given twice."""
    checkpoint: str
    """Its uuid."""
    experiment_id: int
    """Whose checkpoint it is."""
    trial_id: int
    """Of which trial."""
    steps_completed: int
    """Batches that the trial had trained."""
    size_bytes: int
    """Of all its files."""
    metrics: dict[str, Num] | None
    """Validation metrics at that step."""
    notes: str
    """What was said of it when it was registered."""
    created_at: Time | None
    """When that was."""


class Model(Resource, frozen=True):
    """A model of the registry."""

    name: str
    """Its name."""
    description: str
    """What it is for."""
    created_at: Time | None
    """When it was added."""
    versions: list[ModelVersion]
    """Its checkpoints, the oldest version first; they are kept until they are taken out."""


class ModelFile(Resource, frozen=True):
    """A file of a model directory."""

    path: str
    """Inside the directory."""
    size_bytes: int
    """Of it."""


class ModelFilePage(Resource, frozen=True):
    """All files of a model directory, by their paths."""

    files: list[ModelFile]
    next_after: None


class SubmittedAnswer(Resource, frozen=True):
    """The configuration of an experiment as it was submitted."""

    config: dict[str, Any]


class EngineEntry(Resource, frozen=True):
    """A value of the engine's configuration."""

    key: str
    """Dotted."""
    value: Any
    """What the engine uses."""
    origin: str
    """`file`, `override`, `auto`, `default`, `derived` or `hint`; after a colon a remark."""


class EngineAnswer(Resource, frozen=True):
    """The engine's configuration of a trial."""

    file: str | None
    """The engine file in the model directory; null where the experiment holds its content."""
    entries: list[EngineEntry]
    """Every key that has an effect."""
    changes: list[str]
    """What was written otherwise before the file was read."""
    problems: list[str]
    """Why there are no entries."""


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
    time_s: list[float] | None = None
    """When each point was reported, in seconds since 1970; null unless `times` asks for it."""


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
    enabled: bool
    """Whether new runs may start on it, as its owner says."""


class Agent(Resource, frozen=True):
    """A machine that offers slots."""

    id: int
    """Number, from 1."""
    name: str
    """The same name is the same agent."""
    host: str
    """Name of the machine."""
    pool: str
    """The resource pool that it has joined."""
    alive: bool
    """Whether it asks for work, or may yet."""
    state: Literal["ready", "draining", "disabled", "silent", "leaving", "gone"]
    """`ready` takes runs. `draining`: disabled, and runs still hold slots. `silent`: it has not
    asked for work for a while; its runs go on if it comes back in time. `gone`: given up."""
    enabled: bool
    """Whether new runs may start there, as its owner says."""
    silent_s: float
    """Seconds since it was heard of."""
    slots: list[Slot]
    """Its devices: `id`, `device`, `run_id` of the run that holds it, whether it is `enabled`."""
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
    pool: str
    """The resource pool in which it waits."""
    place: int
    """Place in the queue of its pool, from 1."""
    priority: int
    """1 to 99; the smallest is the first to run, unless the pool's policy is `fifo`."""
    weight: float
    """Its share of the slots, in a pool with the policy `fair_share`."""
    max_slots: int | None
    """Most slots that its trials may hold together."""
    queue_time: int | None
    """Seconds after which it ends if no trial of it has had slots."""
    labels: list[str]
    """Its labels; a quota may name one."""
    slots_per_trial: int
    """What one trial of it needs."""
    running_trials: int
    """Those that hold slots."""
    queued_trials: int
    """Those that wait for slots."""
    held_slots: int
    """Slots that its runs hold."""
    waiting_reason: str | None
    """Why its next trial waits, whether or not others run; null when none waits."""
    fewer_reason: str | None
    """Which of its trials runs on fewer slots than it was made for, and whether it leaves for more;
    null when none does."""
    created_at: Time
    """When it was submitted."""


class Pool(Resource, frozen=True):
    """Agents that are scheduled together."""

    name: str
    """Given with `zerolab agent start --pool`, and in `resources.resource_pool`."""
    policy: Literal["fair_share", "priority", "fifo"]
    """In which order its jobs start."""
    agents: int
    """Agents in it that are there."""
    slots: int
    """Their slots."""
    free_slots: int
    """Slots on which a run could start now."""
    jobs: int
    """Experiments in it that have not ended."""
    max_slots: int | None
    """Most slots that its jobs may hold together: its quota."""


class Quota(Resource, frozen=True):
    """Most slots that some jobs may hold together."""

    group: str
    """`pool:NAME` or `label:NAME`."""
    max_slots: int
    """The limit."""
    held_slots: int
    """Slots that such jobs hold now."""


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


class RunPage(Resource, frozen=True):
    """All runs of a trial, the oldest first."""

    runs: list[Run]
    next_after: None = None


class CheckpointAnswer(Resource, frozen=True):
    """One checkpoint."""

    checkpoint: Checkpoint


class ModelPage(Resource, frozen=True):
    """All models, by their names."""

    models: list[Model]
    next_after: None = None


class ModelAnswer(Resource, frozen=True):
    """One model."""

    model: Model


class ExperimentPage(Resource, frozen=True):
    """A page of experiments."""

    experiments: list[Experiment]
    next_after: str | None


class TrialPage(Resource, frozen=True):
    """A page of trials."""

    trials: list[Trial]
    next_after: str | None
    total: int
    """How many there are on all pages."""


class TrialColumns(Resource, frozen=True):
    """All trials of an experiment, the oldest first: a list for each column."""

    columns: dict[str, list[float | str | bool | None]]
    """`id`, `state` and other fields of a trial by their names, and each hyperparameter as
    `hparams.` and its dotted name; null where a trial has none. Numbers that are not finite are
    text, as everywhere."""


class Improvement(Resource, frozen=True):
    """A validation that was better than all before it."""

    time: Time
    """When the searcher was told of it."""
    trial_id: int
    """Of which trial."""
    length: float | None
    """How far that trial was, in the searcher's unit."""
    value: Num
    """The searcher's metric."""


class SearchProgress(Resource, frozen=True):
    """The best value so far over time."""

    improvements: list[Improvement]
    validations: int
    """How many validations there were, those that were not better too."""


class HparamShare(Resource, frozen=True):
    """How much one hyperparameter matters."""

    name: str
    """Its dotted name."""
    importance: float
    """Its part in the differences between trials, alone and together with others: 0 for one that
    does not matter, 1 for one that decides alone."""
    spread: float
    """Standard error of that, over the trees."""


class Importance(Resource, frozen=True):
    """Which hyperparameters matter for the searcher's metric."""

    method: str
    """How it was found out, and what that cannot tell."""
    trials: int
    """How many trials with a result it stands on."""
    explained: float | None
    """How much of the differences between trials the hyperparameters predict for trials that were
    not learned from: 1 is all, 0 or below nothing. Below 0.2 the shares mean little."""
    shares: list[HparamShare]
    """The one that matters most comes first."""
    problem: str | None
    """Why there are none; else null."""


class CheckpointPage(Resource, frozen=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_after: str | None
    count: int
    """How many are there, on all pages; deleted ones are not counted."""
    size_bytes: int
    """Of those."""


class RemovedCheckpoint(Resource, frozen=True):
    """What goes of a checkpoint."""

    uuid: str
    """Its name."""
    trial_id: int
    """Whose state it is."""
    steps_completed: int
    """Batches that the trial had trained."""
    whole: bool
    """Whether all of it goes."""
    files: list[str]
    """The files that go."""
    size_bytes: int
    """Of those files."""


class Removal(Resource, frozen=True):
    """What was removed, or would be."""

    dry_run: bool
    """Nothing was done."""
    checkpoints: list[RemovedCheckpoint]
    """What goes of each."""
    size_bytes: int
    """Of all that goes."""


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


class JobAnswer(Resource, frozen=True):
    """One job."""

    job: Job


class AgentAnswer(Resource, frozen=True):
    """One agent."""

    agent: Agent


class PoolPage(Resource, frozen=True):
    """All pools."""

    pools: list[Pool]
    next_after: None = None


class PoolAnswer(Resource, frozen=True):
    """One pool."""

    pool: Pool


class QuotaPage(Resource, frozen=True):
    """All quotas."""

    quotas: list[Quota]
    next_after: None = None


class QuotaAnswer(Resource, frozen=True):
    """One quota."""

    quota: Quota


class RungEntry(Resource, frozen=True):
    """A trial that was judged at a rung."""

    trial_id: int
    """Which trial."""
    metric: Num | None
    """As it was reported; null when it was not a number, or never came."""
    state: EntryState
    """`promoted` went on to the next rung; `paused` waits, and may still go on; `stopped` ended
    there; `completed` is at the highest rung; `failed` ended early, and ranks last."""


class Rung(Resource, frozen=True):
    """A length at which trials are compared."""

    length: int
    """In the unit of the search."""
    training: list[int]
    """Trials on their way to it."""
    entries: list[RungEntry]
    """Trials that were judged there, best first."""


class Bracket(Resource, frozen=True):
    """Rungs with lists of their own."""

    trials: int
    """How many trials it has at most, if none has to be replaced."""
    rungs: list[Rung]
    """The lowest first."""


class SearcherState(Resource, frozen=True):
    """Where the trials of a search stand."""

    name: str
    """Which searcher."""
    unit: Literal["batches", "epochs"] | None
    """Of all lengths; null when trials decide by themselves how far they train."""
    metric: str
    """By which trials are compared."""
    smaller_is_better: bool
    """Which way they are compared."""
    done: bool
    """Whether it wants no more trials."""
    progress: Share
    """0 to 1."""
    brackets: list[Bracket]
    """Empty for a searcher that compares no trials while they train."""


class SearcherAnswer(Resource, frozen=True):
    """A search."""

    searcher: SearcherState


class PreviewLength(Resource, frozen=True):
    """Trials that end at one length."""

    length: int
    """In the unit of the search."""
    trials: int
    """How many end there."""


class SearchPreview(Resource, frozen=True):
    """What a search would come to."""

    outline: str
    """In a few words."""
    trials: int | None
    """How many there are; null when the searcher cannot say."""
    unit: Literal["batches", "epochs"] | None
    """Of all lengths; null when trials decide by themselves how far they train."""
    lengths: list[PreviewLength]
    """Which trials end where, if they came to each rung all at once."""
    total_length: int | None
    """Over all trials; null when nobody can say."""
    slots_per_trial: int
    """Slots that each trial holds while it trains."""
    seconds_per_unit: float | None
    """How long one batch, or one epoch, of a trial takes; null when nobody knows."""
    like: int | None
    """The experiment from which that is known; null when it was given."""
    slot_hours: float | None
    """What all trials hold together; null when a time or a length is unknown."""


class PreviewAnswer(Resource, frozen=True):
    """What a search would come to."""

    preview: SearchPreview


class SearchEvent(Resource, frozen=True):
    """Something that a searcher must know."""

    id: int
    """Rising; not without gaps."""
    kind: Literal["created", "validated", "exited", "exited_early"]
    """What happened to the trial."""
    trial_id: int
    """The searcher's own number of the trial, as it said at its creation."""
    metric: Num | None
    """Of `validated`; `NaN` ranks last."""
    length: float | None
    """Of `validated`: how far the trial was, in the unit of the search."""
    reason: str | None
    """Of `exited_early`: `errored`, `invalid_hp` or `user_canceled`."""


class SearchEvents(Resource, frozen=True):
    """Events of a search, the oldest first."""

    events: list[SearchEvent]
    """At most 1,000."""
    handled: int
    """The last event that operations answered; -1 before the first operations, 0 after them."""
    over: bool
    """Whether the experiment takes no more operations."""


class SearchHandled(Resource, frozen=True):
    """What operations have answered."""

    handled: int
    """The last event that is answered by now."""
