"""Searcher of an experiment as a fold over its event log.

An event, the searcher's response and all their effects are stored in one transaction. A searcher
that is not in memory is created again by replaying its events. The trials that it requests are
compared with the stored trials. If they differ, another version of the searcher started the search:
it ends with an error instead of continuing from a wrong state.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import (
    Create,
    ExternalSearcher,
    Operation,
    Reopen,
    Searcher,
    Shutdown,
    Stop,
    compute_deferred,
    make_searcher,
)
from zerolab.searcher.factory import read_section
from zerolab.searcher.operations import ComputedOperation
from zerolab.searcher.view import HasView, SearchView
from zeroserver.orchestrator.caches import SearchCache
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import Orchestrator, config_of
from zeroserver.states import EXPERIMENT_ENDED, TRIAL_ENDED, ExperimentState
from zeroserver.store.database import Change, raw_rows
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import experiments, searcher_events, trials

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig
    from zerolab.searcher.section import SearcherConfig

__all__ = [
    "DELETED",
    "DISABLED",
    "CurrentView",
    "Event",
    "NewSearch",
    "Replay",
    "SearchService",
    "check_custom_class",
    "has_grown",
    "large_searches",
    "look_back",
    "newest_event",
    "prepare_replay",
]

DELETED = "user_canceled"
"""Reason that a searcher receives for a trial that a user has deleted."""
_ADMIN_ONLY = (
    "searcher.entrypoint: must be left out unless an administrator submits the experiment, since "
    "the class runs on the server's machine; run it with `python -m zerolab.client.search`"
)
DISABLED = (
    "searcher.entrypoint: must be left out, since this server was started with "
    "--no-custom-searchers; run the class with `python -m zerolab.client.search`"
)
_INSERT = (
    "INSERT INTO searcher_events "
    "(experiment_id, kind, request_id, value, length, reason, time) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_SILENT_S = 60.0
"""Time without requests after which no program serves a searcher; programs request events every
30 seconds."""
_UNSERVED = (
    "no program serves its custom searcher: start one that calls "
    "zerolab.client.search.serve(client, {0}, MySearch), or any that uses "
    "/api/v1/experiments/{0}/searcher/events and /operations"
)
_LOOKED_BACK = 32
"""Number of ended searches whose view is cached; a replay takes seconds."""
_LARGE = 1000
"""Minimum number of trials of a search that is replayed before the server accepts requests."""
_REPLAYS = 4
"""Maximum number of cached replays."""
_LOST = (
    "another version of Zerolab started this search; this version's searcher requests other "
    "trials, "
    "so the search cannot continue. Metrics and checkpoints are kept: `zerolab experiment fork "
    "{0}` starts a new search, and `zerolab experiment continue {0}` continues under that version"
)


class Event(NamedTuple):
    """Event of a search, passed to its searcher."""

    kind: str
    """``created``, ``validated``, ``exited``, ``exited_early``; ``operated``: an external program
    sent operations that answer all events up to ``length``, and ``value`` is the progress; or
    ``grown``: the searcher's section changed, and ``reason`` is :class:`_Growth` as JSON."""
    request_id: int
    """Number of the trial within the search."""
    value: float | None = None
    """The metric of a validation; None for NaN."""
    length: float | None = None
    """Length that the trial has trained, in the searcher's unit."""
    reason: str | None = None


class _Growth(msgspec.Struct):
    """Growth of a search: its bounds were increased."""

    before: dict[str, Any]
    """The searcher's section before it."""
    lost: list[int]
    """Request ids of the trials that had no checkpoint left to continue from."""


class NewSearch(NamedTuple):
    """A new searcher and its first operations."""

    searcher: Searcher
    operations: Sequence[Operation]

    @classmethod
    def of(cls, config: "ExperimentConfig", seed: int) -> "NewSearch":
        """Create the searcher of an experiment, in any thread; seconds for thousands of trials."""
        searcher = make_searcher(
            config.searcher, _stored(config.to_dict()["hyperparameters"]), seed
        )
        return cls(searcher, compute_deferred(searcher.initial_operations()))


class CurrentView(NamedTuple):
    """View of a search, for the web page."""

    unit: Literal["batches", "epochs"] | None
    """Unit of its lengths."""
    view: SearchView = SearchView()
    problem: str | None = None
    """Why there is no view."""


class Replay(NamedTuple):
    """A searcher that was rebuilt from the events of its experiment."""

    searcher: Searcher
    operations: Sequence[Sequence[ComputedOperation]]
    """Its first operations, then those after each event; none is deferred."""
    problem: str | None
    """Why it does not match the experiment's stored trials; None if it does."""
    events: list[Event]
    """All searcher events of the experiment, oldest first."""
    newest: int
    """Number of the last event."""
    created: Set[int]
    """Request ids of all trials ever created."""
    ends: Set[int]
    """Request ids of trials that ended for the searcher and were not reopened."""
    section: "SearcherConfig"
    """Section of the searcher after the last event."""

    def is_current(self, connection: Connection, experiment_id: int) -> bool:
        """Check whether no event was stored since."""
        return self.newest == newest_event(connection, experiment_id)


class _Lost:
    """Placeholder for a searcher that cannot be replayed, until its experiment is ended."""

    def initial_operations(self) -> list[Operation]:
        return []

    def trial_created(self, trial_id: int) -> list[Operation]:
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        return []

    def trial_exited_early(self, trial_id: int, reason: str) -> list[Operation]:
        return []

    def progress(self) -> float:
        return 0.0


_EVENTS = (
    "SELECT kind, request_id, value, length, reason FROM searcher_events "
    "WHERE experiment_id = ? ORDER BY id"
)


class SearchService(Service):
    """Stores events of searches and asks their searchers for operations."""

    @property
    def cache(self) -> SearchCache:
        """Searchers and operations that outlive the unit of work."""
        return self.work.orchestrator.searches

    def first_operations(self, experiment_id: int, new_search: NewSearch) -> Sequence[Operation]:
        """Cache the searcher of a new experiment and return its first operations."""
        searcher = new_search.searcher
        self._keep(experiment_id, searcher)
        if isinstance(searcher, ExternalSearcher):
            self.cache.served[experiment_id] = -math.inf  # not served before
            if self.cache.custom is not None:
                self.cache.custom.add(experiment_id)
        return new_search.operations

    def add_event(self, experiment_id: int, event: Event) -> list[Operation]:
        """Store an event, pass it to the searcher and return the searcher's operations."""
        return self.add_events(experiment_id, [event])

    def add_events(self, experiment_id: int, events: Sequence[Event]) -> list[Operation]:
        """Store events, pass them to the searcher and return the searcher's operations."""
        if not events:
            return []
        searcher = self._find(experiment_id)
        self._store(experiment_id, events)
        if isinstance(searcher, ExternalSearcher):
            self.work.changes.append(Change(f"searcher:{experiment_id}"))
        return [operation for event in events for operation in _apply(searcher, event)]

    def _store(self, experiment_id: int, events: Sequence[Event]) -> None:
        now = self.work.clock()
        self.work.many(_INSERT, [(experiment_id, *event, now) for event in events])

    def pending_operations(self, experiment_id: int) -> list[ComputedOperation]:
        """Return the operations that have not been executed, in order."""
        created = self.created_trials(experiment_id)
        ends = self.ended_trials(experiment_id)
        replayed = self._take_replay(experiment_id)
        if replayed.problem is not None:
            return []
        self._keep(experiment_id, replayed.searcher)
        operations = _operations_in_force(replayed)
        reopened = {
            item.trial_id: index
            for index, item in enumerate(operations)
            if isinstance(item, Reopen)
        }
        columns = trials.c
        query = select(columns.request_id, columns.state, columns.stop, columns.until)
        result = self.work.connection.execute(query.where(columns.experiment_id == experiment_id))
        rows = {row.request_id: row for row in result}

        def is_pending(at: int, operation: ComputedOperation) -> bool:
            if isinstance(operation, Shutdown) or operation.trial_id not in created:
                return True
            row = rows.get(operation.trial_id)
            if (
                row is None
                or isinstance(operation, Create)
                or at < reopened.get(operation.trial_id, 0)
            ):
                return False
            if row.state in TRIAL_ENDED:  # pending if it is reopened, unless it has ended since
                return operation.trial_id in reopened and operation.trial_id not in ends
            if row.stop is not None or isinstance(operation, Reopen):
                return False
            return isinstance(operation, Stop) or row.until is None or row.until < operation.until

        return [
            operation for index, operation in enumerate(operations) if is_pending(index, operation)
        ]

    def progress(self, experiment_id: int) -> float:
        """Return the progress of the search, 0 to 1."""
        return self._find(experiment_id).progress()

    def searcher(self, experiment_id: int) -> Searcher:
        """Return an experiment's searcher."""
        return self._find(experiment_id)

    def unserved(self) -> dict[int, str]:
        """Return the custom searches that no program serves, with instructions to start one.

        No program has requested their events for a minute, and the server runs no class for them.
        After its start the server also waits a minute for programs to reconnect.
        """
        columns = experiments.c
        custom = select(columns.id).where(columns.searcher_name == "custom")
        if self.cache.custom is None:
            self.cache.custom = set(self.work.connection.scalars(custom))
            self.cache.served = (
                dict.fromkeys(self.cache.custom, self.work.steady()) | self.cache.served
            )
        if not self.cache.custom:
            return {}
        active = custom.where(
            columns.id.in_(self.cache.custom),
            columns.state == ExperimentState.ACTIVE,
            columns.searcher_done == 0,
        )
        silent = self.work.steady() - _SILENT_S
        return {
            experiment_id: _UNSERVED.format(experiment_id)
            for experiment_id in self.work.connection.scalars(active).all()
            if self.cache.served[experiment_id] < silent
            and self.work.config(experiment_id).searcher.external_entrypoint is None
        }

    def created_trials(self, experiment_id: int) -> Set[int]:
        """Return the request ids of all trials ever created, including deleted ones."""
        prepared = self._prepared(experiment_id)
        if prepared is not None:
            return prepared.created
        query = (
            "SELECT request_id FROM searcher_events WHERE experiment_id = ? AND kind = 'created'"
        )
        return {number for (number,) in self.work.raw(query, (experiment_id,))}

    def view(self, experiment_id: int) -> CurrentView:
        """Return the current view of a search."""
        config = self.work.config(experiment_id)
        view = _view(self._find(experiment_id))
        return CurrentView(config.searcher.unit, view, self.cache.lost.get(experiment_id))

    def _find(self, experiment_id: int) -> Searcher:
        searcher = self.cache.searchers.get(experiment_id)
        if searcher is None:
            replayed = self._take_replay(experiment_id)
            searcher = replayed.searcher
            if replayed.problem is not None:
                searcher = _Lost()
                self.cache.lost[experiment_id] = replayed.problem
        self._keep(experiment_id, searcher)
        return searcher

    def take_lost(self) -> dict[int, str]:
        """Return and clear the searches that cannot continue, with the reasons."""
        lost, self.cache.lost = self.cache.lost, {}
        self.work.undo.append(lambda: self.cache.lost.update(lost))
        return lost

    def replay(self, experiment_id: int) -> list[ComputedOperation]:
        """Replay a search from its events; return all its operations.

        Raises:
            ConflictError: If the replay does not match the stored trials.
        """
        return _operations_in_force(self._replayed(experiment_id))

    def ended_trials(self, experiment_id: int) -> Set[int]:
        """Return the request ids of trials that ended for the searcher.

        Excludes trials that it has reopened since.
        """
        prepared = self._prepared(experiment_id)
        if prepared is not None:
            return prepared.ends
        events = _stored_events(self.work.connection, experiment_id)
        if any(event.kind == "grown" for event in events):
            return self._replay(experiment_id).ends
        return _ends(events, itertools.repeat(()))

    def grow(
        self,
        experiment_id: int,
        before: "SearcherConfig",
        lost: Collection[int],
    ) -> Sequence[Operation]:
        """Continue a search with greater bounds; return the searcher's operations.

        Replays use the former bounds for the events so far and the new bounds for later events.
        Call :meth:`SearchService.restore` before the configuration changes.

        Args:
            experiment_id: Experiment whose configuration already has the new bounds.
            before: Former section of its searcher.
            lost: Request ids of the trials without a checkpoint to continue from.
        """
        searcher = self._find(experiment_id)
        growth = _Growth(before.model_dump(mode="json", exclude_none=True), sorted(lost))
        event = Event("grown", 0, reason=msgspec.json.encode(growth).decode())
        self._store(experiment_id, [event])
        return self.work.config(experiment_id).searcher.grow(searcher, growth.lost)

    def restore(self, experiment_id: int) -> None:
        """Load the searcher of an ended experiment into memory.

        Raises:
            ConflictError: If the replay does not match the stored trials.
        """
        self._replayed(experiment_id)

    def _replayed(self, experiment_id: int) -> "Replay":
        replayed = self._take_replay(experiment_id)
        if replayed.problem is not None:
            msg = f"experiment {experiment_id}: cannot be continued: {replayed.problem}"
            raise ConflictError(msg)
        self._keep(experiment_id, replayed.searcher)
        return replayed

    def load(self, experiment_id: int) -> None:
        """Load the searcher of an experiment that has not ended into memory."""
        row = self.work.find(ExperimentRow, experiment_id)
        if row.state not in EXPERIMENT_ENDED:
            self._find(experiment_id)

    def _prepared(self, experiment_id: int) -> Replay | None:
        """Return the cached replay of a search if it is up to date."""
        prepared: Replay | None = self.cache.replays.get(experiment_id)
        if prepared is None or not prepared.is_current(self.work.connection, experiment_id):
            return None
        return prepared

    def _replay(self, experiment_id: int) -> Replay:
        """Return a replay of all events, cached until its searcher is used."""
        section = self.work.config(experiment_id).searcher
        prepared = self._prepared(experiment_id)
        if prepared is None or prepared.section != section:
            row = self.work.find(ExperimentRow, experiment_id)
            prepared = self.cache.replays[experiment_id] = _fold(self.work.connection, row, section)
            self.work.undo.append(lambda: _drop_replay(self.work.orchestrator, experiment_id))
        return prepared

    def _take_replay(self, experiment_id: int) -> Replay:
        """Return a replay and remove it from the cache."""
        # A searcher is mutable: the caller's receives new events, so the cache, which must reflect
        # only stored events, cannot share it.
        replayed = self._replay(experiment_id)
        _drop_replay(self.work.orchestrator, experiment_id)
        return replayed

    def _keep(self, experiment_id: int, searcher: Searcher) -> None:
        self.cache.searchers[experiment_id] = searcher
        # After a rollback the searcher in memory would include events that are not stored.
        self.work.undo.append(lambda: _drop(self.work.orchestrator, experiment_id))


def check_custom_class(
    orchestrator: Orchestrator, config: "ExperimentConfig", owner_id: int
) -> None:
    """Refuse an experiment with a custom searcher class if the server forbids them.

    Such a class runs as the user of the server and could read the token of the installation.

    Raises:
        ConfigError: If the server was started with ``--no-custom-searchers``, or the owner is no
            administrator.
    """
    if not config.searcher.external_entrypoint:
        return
    if not orchestrator.settings.custom_searchers:
        raise ConfigError("experiment", [DISABLED])
    owner = orchestrator.users.user(owner_id)
    if owner is None or owner.role != "admin":
        raise ConfigError("experiment", [_ADMIN_ONLY])


def newest_event(connection: Connection, experiment_id: int) -> int:
    """Return the id of the last event of a search; 0 if it has none."""
    columns = searcher_events.c
    query = select(func.max(columns.id)).where(columns.experiment_id == experiment_id)
    return connection.scalar(query) or 0


def look_back(
    orchestrator: Orchestrator, connection: Connection, row: ExperimentRow
) -> CurrentView:
    """Return the view of an ended search.

    Args:
        orchestrator: Settings and caches; used in any thread.
        connection: Connection for reading.
        row: The experiment.
    """
    last_event = newest_event(connection, row.id)
    if not last_event:  # an imported run has no events
        return CurrentView(None)
    cached_event, current = orchestrator.searches.ended_views.get(row.id, (None, CurrentView(None)))
    if cached_event == last_event:
        return current
    section = config_of(row).searcher
    replayed = _fold(connection, row, section)
    view = SearchView() if replayed.problem else _view(replayed.searcher)
    current = CurrentView(section.unit, view, replayed.problem)
    orchestrator.searches.ended_views[row.id] = last_event, current
    for experiment_id in list(orchestrator.searches.ended_views)[:-_LOOKED_BACK]:
        orchestrator.searches.ended_views.pop(experiment_id, None)
    return current


def _view(searcher: Searcher) -> SearchView:
    return searcher.view() if isinstance(searcher, HasView) else SearchView()


def _operations_in_force(replayed: "Replay") -> list[ComputedOperation]:
    """Return all operations of a replay in order, without a Shutdown revoked by growth."""
    operations: list[ComputedOperation] = []
    for event, step in zip([None, *replayed.events], replayed.operations, strict=True):
        if event is not None and event.kind == "grown":
            operations = [
                operation for operation in operations if not isinstance(operation, Shutdown)
            ]
        operations += step
    return operations


def prepare_replay(
    orchestrator: Orchestrator,
    connection: Connection,
    experiment_id: int,
    section: "SearcherConfig | None" = None,
) -> Replay | None:
    """Replay the events of a search in a reader thread, for a later transaction.

    A replay takes a second for ten thousand trials. A transaction without an up-to-date replay
    replays the events itself.

    Args:
        orchestrator: Settings and caches; used in any thread.
        connection: Connection for reading.
        experiment_id: The experiment.
        section: Section of the searcher that the transaction will use; None for the stored one.

    Returns:
        The replay; None if the search has no events.
    """
    row = find_row(connection, ExperimentRow, experiment_id)
    if not newest_event(connection, experiment_id):
        return None
    replay = _fold(connection, row, section or config_of(row).searcher)
    orchestrator.searches.replays[experiment_id] = replay
    for number in list(orchestrator.searches.replays)[:-_REPLAYS]:
        orchestrator.searches.replays.pop(number, None)
    return replay


def has_grown(connection: Connection, experiment_id: int) -> bool:
    """Check whether the bounds of a search were ever increased."""
    query = "SELECT 1 FROM searcher_events WHERE experiment_id = ? AND kind = 'grown' LIMIT 1"
    return bool(raw_rows(connection, query, (experiment_id,)))


def large_searches(connection: Connection) -> list[int]:
    """Return the active searches with a slow replay, oldest first."""
    columns = experiments.c
    query = select(columns.id, columns.num_trials, columns.searcher_name).where(
        columns.state == ExperimentState.ACTIVE,
        columns.searcher_done == 0,
        columns.creating == 0,
        columns.searcher_name != "single",
    )
    rows = connection.execute(query.order_by(columns.id)).all()
    slow = _slow_searchers({row.searcher_name for row in rows if row.num_trials < _LARGE})
    return [row.id for row in rows if row.num_trials >= _LARGE or row.searcher_name in slow]


def _slow_searchers(names: Collection[str]) -> set[str]:
    if not names:
        return set()
    from zerolab.searcher.registry import SEARCHERS  # startup does not need it

    sections = {name: SEARCHERS.find(name) for name in names}
    return {name for name, section in sections.items() if section and section.has_slow_replay}


def _drop_replay(orchestrator: Orchestrator, experiment_id: int) -> None:
    orchestrator.searches.replays.pop(experiment_id, None)


def _fold(connection: Connection, row: ExperimentRow, section: "SearcherConfig") -> Replay:
    """Create a searcher and replay all its events."""
    newest = newest_event(connection, row.id)
    events = _stored_events(connection, row.id)
    growths = [
        msgspec.json.decode(event.reason or "", type=_Growth)
        for event in events
        if event.kind == "grown"
    ]
    sections = [*(read_section(growth.before) for growth in growths), section]
    searcher = _searcher(row, sections[0])
    operations = [compute_deferred(searcher.initial_operations())]
    stage = 0
    for event in events:
        if event.kind == "grown":
            stage += 1
            grown = sections[stage].grow(searcher, growths[stage - 1].lost)
            operations.append(compute_deferred(grown))
        else:
            operations.append(compute_deferred(_apply(searcher, event)))
    independent = section.has_independent_trials or isinstance(searcher, ExternalSearcher)
    # Decisions are not stored but derived from the events. Another version of the searcher may
    # decide differently, which would attribute metrics to the wrong trials. Comparing the created
    # trials detects that.
    same = independent or _requested_the_trials(connection, row.id, events, operations)
    problem = None if same else _LOST.format(row.id)
    created = {event.request_id for event in events if event.kind == "created"}
    ends = _ends(events, operations[1:])
    return Replay(searcher, operations, problem, events, newest, created, ends, section)


def _ends(events: Iterable[Event], all_operations: Iterable[Sequence[Operation]]) -> set[int]:
    """Return the trials that ended and were not reopened by later operations."""
    ends: set[int] = set()
    for event, operations in zip(events, all_operations, strict=False):
        if event.kind in {"exited", "exited_early"}:
            ends.add(event.request_id)
        ends -= {operation.trial_id for operation in operations if isinstance(operation, Reopen)}
    return ends


def _requested_the_trials(
    connection: Connection,
    experiment_id: int,
    events: Iterable[Event],
    operations: Iterable[Sequence[Operation]],
) -> bool:
    """Check whether a replayed searcher requested the stored trials of its experiment."""
    requested = {
        operation.trial_id: operation.hparams
        for step in operations
        for operation in step
        if isinstance(operation, Create)
    }
    existing = {event.request_id for event in events if event.kind == "created"}
    columns = trials.c
    created = connection.execute(
        select(columns.request_id, columns.hparams).where(columns.experiment_id == experiment_id)
    )
    return existing <= requested.keys() and all(
        _alike(_stored(requested[number]), msgspec.json.decode(hparams))
        for number, hparams in created
        if number in existing
    )


def _stored(hparams: Mapping[str, Any]) -> Any:
    """Convert hyperparameters as storing them does: NaN becomes null, a tuple a list."""
    return msgspec.json.decode(msgspec.json.encode(hparams))


def _alike(first: Any, second: Any) -> bool:
    """Compare hyperparameters, with a tolerance for the rounding of other machines."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _alike(first[key], second[key]) for key in first
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)


def _stored_events(connection: Connection, experiment_id: int) -> list[Event]:
    """Return all events, oldest first."""
    return [Event(*row) for row in raw_rows(connection, _EVENTS, (experiment_id,))]


def _searcher(row: ExperimentRow, section: "SearcherConfig") -> Searcher:
    hyperparameters: dict[str, Any] = msgspec.json.decode(row.config)["hyperparameters"]
    return make_searcher(section, hyperparameters, row.seed)


def _drop(orchestrator: Orchestrator, experiment_id: int) -> None:
    orchestrator.searches.searchers.pop(experiment_id, None)


def _apply(searcher: Searcher, event: Event) -> Sequence[Operation]:
    if event.kind == "created":
        return searcher.trial_created(event.request_id)
    if event.kind == "validated":
        value = math.nan if event.value is None else event.value
        return searcher.validation_completed(event.request_id, value, event.length or 0.0)
    if event.kind == "exited":
        return searcher.trial_exited(event.request_id)
    if event.kind == "operated":
        assert isinstance(searcher, ExternalSearcher)
        searcher.record_operations(int(event.length or 0), event.value)
        return []
    return searcher.trial_exited_early(event.request_id, event.reason or "errored")
