"""Base class of the domain services, and their shared transaction."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from sqlalchemy import Table, update

from zerolab.contract.notifications import EventName
from zerolab.contract.secrets import find_secrets
from zerolab.contract.storage import StorageAddress
from zerolab.paths import Home
from zeroserver.event_journal import RELOAD
from zeroserver.orchestrator.state import Orchestrator, config_of
from zeroserver.settings import Settings
from zeroserver.store.database import Change, Transaction
from zeroserver.store.rows import ExperimentRow, Reporting, Row, RunRow, TrialRow, find_row
from zeroserver.visibility import EVERYTHING

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["DomainEvent", "DomainTransaction", "EventKind", "Service", "Uses"]

R = TypeVar("R", bound=Row)
S = TypeVar("S", bound="Service")


EventKind = Literal["created"] | EventName
"""Events of experiments until ``canceled``, then of trials, except ``waiting``."""


class DomainEvent(msgspec.Struct, frozen=True):
    """Change that an extension may react to."""

    kind: EventKind
    experiment_id: int
    trial_id: int | None = None
    text: str = ""
    """Error of a trial, or other details."""
    title: str = ""
    """Title of an alert."""


class DomainTransaction(Transaction):
    """Transaction of the writer with the orchestrator's caches and clocks.

    A change of a cache must append its reversal to ``undo``, so that a rollback restores the cache.
    """

    def __init__(self, orchestrator: Orchestrator, transaction: Transaction) -> None:
        vars(self).update(vars(transaction))
        self.orchestrator = orchestrator
        self.hidden = EVERYTHING
        """Ids of the projects that the caller of the request must not see."""

    @property
    def work(self) -> "DomainTransaction":
        """This transaction, for :class:`Uses`."""
        return self

    @property
    def settings(self) -> Settings:
        """Settings of the server."""
        return self.orchestrator.settings

    @property
    def home(self) -> Home:
        """Folder of the server's files."""
        return self.orchestrator.home

    @property
    def clock(self) -> Callable[[], float]:
        """Wall clock in seconds since 1970; it may be set forward and back."""
        return self.orchestrator.clock

    @property
    def steady(self) -> Callable[[], float]:
        """Monotonic clock in seconds, for deadlines."""
        return self.orchestrator.steady

    def find(self, kind: type[R], row_id: int) -> R:
        """Return the row with an id.

        Raises:
            NotFoundError: If there is no such row.
        """
        return find_row(self.connection, kind, row_id)

    def experiment_of(self, row: TrialRow | RunRow | Reporting) -> ExperimentRow:
        """Read the experiment of a trial or run."""
        return self.find(ExperimentRow, row.experiment_id)

    def trial_of(self, run: RunRow | Reporting) -> TrialRow:
        """Read the trial of a run."""
        return self.find(TrialRow, run.trial_id)

    def save(self, table: Table, row_id: int, **values: Any) -> None:
        """Update columns of one row."""
        self.connection.execute(update(table).where(table.c.id == row_id).values(**values))

    def config(self, experiment_id: int) -> "ExperimentConfig":
        """Return an experiment's configuration without its log policies."""
        configs = self.orchestrator.configs.configs
        config = configs.get(experiment_id)
        if config is None:
            config = configs[experiment_id] = config_of(self.find(ExperimentRow, experiment_id))
            # The row may be new: after a rollback another experiment gets its id.
            self.undo.append(lambda: self.orchestrator.configs.forget(experiment_id))
        return config

    def secrets_of(self, experiment_id: int) -> tuple[str, ...]:
        """Return the secret values of an experiment's configuration, for masking in logs."""
        secrets = self.orchestrator.configs.secrets.get(experiment_id)
        if secrets is None:
            raw_config = self.find(ExperimentRow, experiment_id).raw_config
            secrets = tuple(find_secrets(msgspec.json.decode(raw_config)))
            self.orchestrator.configs.secrets[experiment_id] = secrets
            self.undo.append(lambda: self.orchestrator.configs.forget(experiment_id))
        return secrets

    def storage_of(self, experiment_id: int) -> StorageAddress:
        """Return the address of an experiment's checkpoint storage."""
        from zerolab.config.experiment.storage import address_of

        address = address_of(self.config(experiment_id).checkpoint_storage)
        return address or StorageAddress(root=str(self.home.checkpoints))

    def forget_job(self, experiment_id: int) -> None:
        """Drop an experiment's cached queue entry, since this transaction modifies it."""
        self.orchestrator.queue.drop([experiment_id])
        self.undo.append(lambda: self.orchestrator.queue.drop([experiment_id]))

    def touch(self, kind: str, experiment_id: int, resource: Any) -> None:
        """Add a change to the event streams of an experiment."""
        self.changes.append(Change("", experiment_id, kind, resource))

    def touch_trials(self, experiment_id: int, trial_ids: Iterable[int]) -> None:
        """Add changes of many trials to the event streams, if they have readers."""
        if self.has_readers(experiment_id):
            for trial_id in trial_ids:
                self.touch("trial", experiment_id, trial_id)

    def has_readers(self, experiment_id: int, *, of_all: bool = False) -> bool:
        """Check whether an experiment's events have readers and must be created.

        A reader that connects before the commit has read the old state. After the commit it gets a
        reload event.

        Args:
            experiment_id: Experiment of the events.
            of_all: Count only readers of metrics and logs, not those of the experiment list.
        """
        journal = self.orchestrator.journal
        check = journal.followed if of_all else journal.wanted
        if check(experiment_id):
            return True

        def check_again() -> None:
            if check(experiment_id):
                self.changes.append(Change("", experiment_id, RELOAD))

        self.then.append(check_again)
        return False

    def emit(
        self,
        kind: EventKind,
        experiment_id: int,
        trial_id: int | None = None,
        *,
        text: str = "",
        title: str = "",
    ) -> None:
        """Pass an event to the observers of extensions, in this transaction.

        Args:
            kind: What has happened.
            experiment_id: The experiment.
            trial_id: The trial, if it is an event of a trial.
            text: Error of a trial, or other details.
            title: Title of an alert.

        Raises:
            ConfigError: If an observer refuses a new experiment.
        """
        for observe in self.orchestrator.observers:
            observe(self, DomainEvent(kind, experiment_id, trial_id, text, title))

    def log_line(self, run: RunRow | Reporting, text: str, level: str = "INFO") -> None:
        """Write a line into a run's log, as the server."""
        self.log(run.experiment_id, run.trial_id, run.id, text, level)

    def log(
        self, experiment_id: int, trial_id: int, run_id: int | None, text: str, level: str
    ) -> None:
        """Write a line into a trial's log, as the server."""
        query = "INSERT INTO logs (experiment_id, trial_id, run_id, stream, level, text, time) "
        query += "VALUES (?, ?, ?, 'server', ?, ?, ?) RETURNING id"
        values = (experiment_id, trial_id, run_id, level, text, self.clock())
        ((line,),) = self.raw(query, values)
        self.touch("log", experiment_id, (line, line))


class Service:
    """Part of the domain logic within one transaction; declares the services it calls."""

    def __init__(self, work: DomainTransaction) -> None:
        self.work = work


class Uses(Generic[S]):
    """Descriptor of a service used by another one, created on first access.

    Unlike ``functools.cached_property`` before Python 3.12 it takes no lock, which speeds up
    reports.
    """

    def __init__(self, service: type[S]) -> None:
        self._service = service

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, user: DomainTransaction | Service, owner: type) -> S:
        service = user.__dict__[self._name] = self._service(user.work)
        return service
