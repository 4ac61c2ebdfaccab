"""The searcher of an experiment as a fold over its event log.

An event is stored and told to the searcher in one transaction with everything that follows from
it. A searcher that is not in memory is made anew: its first operations and the events so far are
replayed and their operations, which were carried out long ago, dropped.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, RowMapping, select

from zerolab.searcher import Operation, Searcher, make_searcher
from zerolab.searcher.custom import ServedOutside
from zerolab.searcher.view import HasView, SearchView
from zeroserver.orchestrator.desk import World, config_of, find
from zeroserver.store.database import Change, Transaction
from zeroserver.store.schema import experiments, searcher_events

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config import ExperimentConfig

__all__ = [
    "Event",
    "Seen",
    "first_operations",
    "look",
    "look_back",
    "progress",
    "replay",
    "searcher_of",
    "tell",
]


_INSERT = searcher_events.insert()


class Event(NamedTuple):
    """Something that the searcher must know."""

    kind: str
    """``created``, ``validated``, ``exited``, ``exited_early``, or ``operated``: operations came
    from outside, that answer all events up to ``length``; ``value`` is the progress."""
    request_id: int
    """The searcher's own number of the trial."""
    value: float | None = None
    """The metric of a validation; None for NaN."""
    length: float | None = None
    """How far the trial was, in the searcher's unit."""
    reason: str | None = None


def first_operations(
    world: World, transaction: Transaction, experiment_id: int
) -> Sequence[Operation]:
    """Make the searcher of a new experiment and return what it wants first."""
    searcher = _make(world, transaction, experiment_id)
    _keep(world, transaction, experiment_id, searcher)
    return searcher.initial_operations()


def tell(
    world: World, transaction: Transaction, experiment_id: int, event: Event
) -> Sequence[Operation]:
    """Store an event, tell it to the searcher and return what the searcher wants."""
    searcher = _find(world, transaction, experiment_id)
    row = {"experiment_id": experiment_id, "time": world.clock(), **event._asdict()}
    transaction.connection.execute(_INSERT, row)
    if isinstance(searcher, ServedOutside):
        transaction.changes.append(Change(f"searcher:{experiment_id}"))
    return _apply(searcher, event)


def progress(world: World, transaction: Transaction, experiment_id: int) -> float:
    """How much of the search is done, 0 to 1."""
    return _find(world, transaction, experiment_id).progress()


def searcher_of(world: World, transaction: Transaction, experiment_id: int) -> Searcher:
    """Return an experiment's searcher."""
    return _find(world, transaction, experiment_id)


class Seen(NamedTuple):
    """What is shown of a search."""

    unit: Literal["batches", "epochs"] | None
    """Of its lengths."""
    view: SearchView


def look(world: World, transaction: Transaction, experiment_id: int) -> Seen:
    """Say where the trials of a search stand now."""
    config = world.config(transaction, experiment_id)
    return Seen(config.searcher.unit, _view(_find(world, transaction, experiment_id)))


def look_back(connection: Connection, row: RowMapping) -> Seen:
    """Say where the trials of an experiment that has ended stood at its end.

    Args:
        connection: Only read from.
        row: The experiment.
    """
    told = _told(connection, row["id"])
    if not told:  # it was brought in from elsewhere
        return Seen(None, SearchView())
    config = config_of(row)
    searcher = _searcher(row, config)
    searcher.initial_operations()
    for event in told:
        _apply(searcher, event)
    return Seen(config.searcher.unit, _view(searcher))


def _view(searcher: Searcher) -> SearchView:
    return searcher.view() if isinstance(searcher, HasView) else SearchView()


def _find(world: World, transaction: Transaction, experiment_id: int) -> Searcher:
    if experiment_id not in world.searchers:
        replay(world, transaction, experiment_id)
    searcher = world.searchers[experiment_id]
    _keep(world, transaction, experiment_id, searcher)
    return searcher


def replay(world: World, transaction: Transaction, experiment_id: int) -> list[Operation]:
    """Make a searcher anew from all that was told; return what it has ever wanted."""
    searcher = _make(world, transaction, experiment_id)
    operations = list(searcher.initial_operations())
    for event in _told(transaction.connection, experiment_id):
        operations += _apply(searcher, event)
    _keep(world, transaction, experiment_id, searcher)
    return operations


def _told(connection: Connection, experiment_id: int) -> list[Event]:
    """All events, in the order in which they were told."""
    columns = searcher_events.c
    stored = connection.execute(
        select(columns.kind, columns.request_id, columns.value, columns.length, columns.reason)
        .where(columns.experiment_id == experiment_id)
        .order_by(columns.id)
    )
    return [Event(*row) for row in stored]


def _make(world: World, transaction: Transaction, experiment_id: int) -> Searcher:
    row: RowMapping = find(transaction, experiments, experiment_id)
    return _searcher(row, world.config(transaction, experiment_id))


def _searcher(row: RowMapping, config: "ExperimentConfig") -> Searcher:
    hyperparameters: dict[str, Any] = msgspec.json.decode(row["config"])["hyperparameters"]
    return make_searcher(config.searcher, hyperparameters, row["seed"])


def _keep(world: World, transaction: Transaction, experiment_id: int, searcher: Searcher) -> None:
    world.searchers[experiment_id] = searcher
    # If the transaction is rolled back the searcher in memory knows too much.
    transaction.undo.append(lambda: _drop(world, experiment_id))


def _drop(world: World, experiment_id: int) -> None:
    world.searchers.pop(experiment_id, None)


def _apply(searcher: Searcher, event: Event) -> Sequence[Operation]:
    if event.kind == "created":
        return searcher.trial_created(event.request_id)
    if event.kind == "validated":
        value = math.nan if event.value is None else event.value
        return searcher.validation_completed(event.request_id, value, event.length or 0.0)
    if event.kind == "exited":
        return searcher.trial_exited(event.request_id)
    if event.kind == "operated":
        assert isinstance(searcher, ServedOutside)
        searcher.operated(int(event.length or 0), event.value)
        return []
    return searcher.trial_exited_early(event.request_id, event.reason or "errored")
