"""Long-lived parts of the orchestrator: settings, clocks and in-memory caches."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from zerolab.contract.names import printable
from zerolab.contract.secrets import restore_secrets
from zerolab.contract.storage import StorageAddress
from zerolab.paths import Home
from zeroserver.event_journal import ALL, Journal
from zeroserver.orchestrator.caches import (
    AgentHeartbeats,
    ConfigCache,
    Deletions,
    MetricCache,
    QueueCache,
    SearchCache,
)
from zeroserver.settings import Settings
from zeroserver.store.config_defaults import DefaultsDirectory
from zeroserver.store.database import Change
from zeroserver.store.janitor import Janitor
from zeroserver.store.project_directory import ProjectDirectory
from zeroserver.store.rows import ExperimentRow
from zeroserver.store.user_directory import ShareDirectory, UserDirectory

if TYPE_CHECKING:  # imported with the first experiment: saves 0.1 s at startup
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = [
    "Orchestrator",
    "agents_changed",
    "config_of",
    "owner_of",
    "resolved_config",
    "stored_address",
]


def _steady_clock() -> Callable[[], float]:
    """Return a monotonic clock that starts at the current wall-clock time."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


@dataclass
class Orchestrator:
    """Long-lived state of a server: settings, clocks and caches of the services."""

    settings: Settings
    home: Home
    journal: Journal
    clock: Callable[[], float] = time.time
    """Wall clock in seconds since 1970; may be set forward and back."""
    steady: Callable[[], float] = field(default_factory=_steady_clock)
    """Monotonic clock for deadlines; starts at the wall-clock time of the server's start."""
    janitor: Janitor = field(default_factory=Janitor)
    configs: ConfigCache = field(default_factory=ConfigCache)
    searches: SearchCache = field(default_factory=SearchCache)
    queue: QueueCache = field(default_factory=QueueCache)
    metrics: MetricCache = field(default_factory=MetricCache)
    deletions: Deletions = field(default_factory=Deletions)
    users: UserDirectory = field(default_factory=UserDirectory)
    projects: ProjectDirectory = field(default_factory=ProjectDirectory)
    defaults: DefaultsDirectory = field(init=False)
    shares: ShareDirectory = field(init=False)
    polling_runs: set[int] = field(default_factory=set)
    """Runs that have polled this server whether to stop; the event loop adds to it."""
    observers: list[Callable[[Any, Any], None]] = field(default_factory=list)
    """Functions of extensions, called with each ``DomainTransaction`` and ``DomainEvent``."""
    agents: AgentHeartbeats = field(init=False)
    installation: str = field(init=False)
    """Unique name of this installation in shared storages."""

    def __post_init__(self) -> None:
        self.defaults = DefaultsDirectory(self.projects)
        self.shares = ShareDirectory(self.users)
        self.agents = AgentHeartbeats(self.settings.timings.tick_s)
        self.installation = self.home.ensure_id()


def resolved_config(experiment: ExperimentRow) -> dict[str, Any]:
    """Return an experiment's configuration with its secrets; never send it in a response."""
    masked = msgspec.json.decode(experiment.config)
    return restore_secrets(masked, msgspec.json.decode(experiment.raw_config))


def config_of(row: ExperimentRow) -> "ExperimentConfig":
    """Parse an experiment's stored configuration, without its log policies."""
    from zerolab.config.experiment.experiment_config import load_experiment

    stored = resolved_config(row)
    if "labels" in stored:  # earlier versions accepted any characters
        stored["name"] = printable(stored["name"])
        stored["description"] = printable(stored["description"] or "") or None
        stored["labels"] = [printable(label) for label in stored["labels"]]
    stored.pop("backend", None)  # removed: the trial refuses `backend: deepspeed` when it starts
    stored.pop("log_policies", None)  # old ones may contain patterns that are now invalid
    return load_experiment(stored)


def agents_changed() -> Change:
    """Return the change that wakes waiting agents and notifies readers of the cluster."""
    return Change("agents", ALL, "cluster", b'{"reload":true}')


def stored_address(home: Home, experiment: ExperimentRow) -> StorageAddress:
    """Return the address of an experiment's checkpoints from its row; in any thread."""
    from zerolab.config.experiment.storage import read_address

    address = read_address(resolved_config(experiment).get("checkpoint_storage") or {})
    return address or StorageAddress(root=str(home.checkpoints))


def owner_of(orchestrator: Orchestrator, trial_id: int) -> str:
    """Return the name of a trial's folder of unfinished checkpoints in its storage."""
    return f"{orchestrator.installation}-trial-{trial_id}"
