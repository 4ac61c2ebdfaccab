"""Long-lived parts of the orchestrator: settings, clocks and in-memory caches."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from zerolab.contract.names import printable
from zerolab.contract.secrets import restore_secrets
from zerolab.contract.storage import StorageAddress
from zerolab.paths import Home
from zerolab.scheduler import Job
from zeroserver.event_journal import ALL, Journal
from zeroserver.orchestrator.wait_reasons import Waiting
from zeroserver.settings import Settings
from zeroserver.store.database import Change
from zeroserver.store.janitor import Janitor
from zeroserver.store.points import MetricKeys
from zeroserver.store.rows import ExperimentRow

if TYPE_CHECKING:  # loaded when the first experiment comes: 0.1 s of a start
    from zerolab.config import ExperimentConfig
    from zerolab.searcher import Operation, Searcher

__all__ = [
    "Orchestrator",
    "agents_changed",
    "config_of",
    "owner_of",
    "resolved_config",
    "stored_address",
]


def _steady_clock() -> Callable[[], float]:
    """Make a clock that agrees with the other one now, and that nobody sets."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


_LATE = 1.5
"""Times the period of its ticks, after which a server was held up."""


@dataclass
class Orchestrator:
    """Settings, clocks and caches of the orchestrator; used by the writer's thread unless noted."""

    settings: Settings
    home: Home
    journal: Journal
    keys: MetricKeys = field(default_factory=MetricKeys)
    reported: dict[int, set[int]] = field(default_factory=dict)
    """Trial to the ids of the metrics that it has reported; of the trials that report."""
    admitted: set[int] = field(default_factory=set)
    """Metrics that trials have come to use since unused names were last looked for."""
    purge_names: bool = False
    """Whether trials were deleted, and with them perhaps the last points of a metric."""
    warned: dict[tuple[int, str], None] = field(default_factory=dict)
    """Runs and kinds of problems of which a warning is in the log already."""
    searchers: dict[int, "Searcher"] = field(default_factory=dict)
    backlog: dict[int, "tuple[Operation, ...]"] = field(default_factory=dict)
    """Experiment to what its searcher wants and was too much for one change."""
    carrying_out: "dict[int, deque[Operation]]" = field(default_factory=dict)
    """Experiment to the operations that the present change carries out; empty between changes."""
    lost: dict[int, str] = field(default_factory=dict)
    """Experiment to why its searcher cannot be made anew; each is ended at the next tick."""
    replays: dict[int, Any] = field(default_factory=dict)
    """Experiment to a replay of its search for a change to come; of any thread."""
    looked_back: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Experiment that has ended to its last event, and what was shown of its search; of any
    thread."""
    configs: dict[int, "ExperimentConfig"] = field(default_factory=dict)
    secrets: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Experiment to the secret values of its configuration; see :meth:`secrets_of`."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Experiment to what the scheduler knows of it; see :meth:`forget_job`."""
    started: float = field(default_factory=time.monotonic)
    seen: dict[int, float] = field(default_factory=dict)
    """Agent to the monotonic time of its last question; written by the event loop."""
    ticked: float = field(default_factory=time.monotonic)
    """The monotonic time of the last :meth:`note_tick`."""
    asking: set[int] = field(default_factory=set)
    """Runs that have asked this server whether to leave; the event loop adds to it."""
    importing: set[int] = field(default_factory=set)
    """Trials whose points are being imported, and which have no row before all are there."""
    orphans: deque[int] = field(default_factory=deque)
    """Trials that were deleted, and whose points and logs are removed a part at a time."""
    unfinished: bool = False
    """Whether a change has left runs to start, or to end, for :func:`tick` to go on with."""
    forgettable: int = 0
    """Points of former runs that the present change may yet forget."""
    retention: set[int] = field(default_factory=set)
    """Experiments whose policy is applied to all their checkpoints, a part at a time."""
    archives_going: set[str] = field(default_factory=set)
    """Archives without an experiment, which are removed as soon as that is committed."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970, for what people read; may be set forward and back."""
    steady: Callable[[], float] = field(default_factory=_steady_clock)
    """For deadlines: what the clock showed when this server started, and what has passed since."""
    janitor: Janitor = field(default_factory=Janitor)
    installation: str = ""
    """Name of this installation in storages that it may share with others."""
    outside: set[int] | None = None
    """Experiments whose searcher is one of the user's own; None before they were read."""
    served: dict[int, float] = field(default_factory=dict)
    """Experiment to the steady time at which a program last asked for its searcher's events."""
    waiting: Waiting = field(default_factory=Waiting)
    """Why trials wait; replaced as a whole, so that any thread may read it."""

    def __post_init__(self) -> None:
        self.installation = self.home.ensure_id()

    def forget_config(self, experiment_id: int) -> None:
        """Have an experiment's configuration read anew when it is next asked for."""
        self.configs.pop(experiment_id, None)
        self.secrets.pop(experiment_id, None)

    def drop_jobs(self, experiment_ids: Iterable[int]) -> None:
        """Forget what was read of some experiments."""
        for experiment_id in experiment_ids:
            self.jobs.pop(experiment_id, None)

    def silence_s(self, agent_id: int) -> float:
        """Seconds since an agent last asked for work, or since the start of this server.

        Those in which the server itself was held up, as by a machine that was suspended, do not
        count: nobody could have been heard then.
        """
        now = time.monotonic()
        return now - self.seen.get(agent_id, self.started) - self._held_up_s(now)

    def note_tick(self) -> None:
        """Note that the server is awake, as it does at every tick; called by the event loop."""
        now = time.monotonic()
        held_up = self._held_up_s(now)
        if held_up:
            self.started = min(now, self.started + held_up)
            self.seen |= {each: min(now, at + held_up) for each, at in list(self.seen.items())}
        self.ticked = now

    def _held_up_s(self, now: float) -> float:
        """Seconds by which the next tick is late, beyond what a busy server may take."""
        return max(0.0, now - self.ticked - _LATE * self.settings.timings.tick_s)


def resolved_config(experiment: ExperimentRow) -> dict[str, Any]:
    """Return an experiment's stored configuration with its secrets; for no response."""
    masked = msgspec.json.decode(experiment.config)
    return restore_secrets(masked, msgspec.json.decode(experiment.raw_config))


def config_of(row: ExperimentRow) -> "ExperimentConfig":
    """Read an experiment's stored configuration; without its log policies, which others read."""
    from zerolab.config import load_experiment

    stored = resolved_config(row)
    if "labels" in stored:  # an earlier version took any characters
        stored["name"] = printable(stored["name"])
        stored["description"] = printable(stored["description"] or "") or None
        stored["labels"] = [printable(label) for label in stored["labels"]]
    stored.pop("backend", None)  # removed: the trial refuses `backend: deepspeed` when it starts
    stored.pop("log_policies", None)  # old ones may hold patterns that are refused now
    return load_experiment(stored)


def agents_changed() -> Change:
    """Wake the agents that wait for work, and tell those who watch the cluster."""
    return Change("agents", ALL, "cluster", b'{"reload":true}')


def stored_address(home: Home, experiment: ExperimentRow) -> StorageAddress:
    """Return where an experiment's checkpoints lie, from its row alone; in any thread."""
    from zerolab.config.experiment.storage import read_address

    found = read_address(resolved_config(experiment).get("checkpoint_storage") or {})
    return found or StorageAddress(root=str(home.checkpoints))


def owner_of(orchestrator: Orchestrator, trial_id: int) -> str:
    """Return the name under which a trial's unfinished checkpoints lie in its storage."""
    return f"{orchestrator.installation}-trial-{trial_id}"
