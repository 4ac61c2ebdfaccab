"""The searcher of an experiment as a fold over its event log.

An event is stored and told to the searcher in one transaction with everything that follows from
it. A searcher that is not in memory is made anew: its first operations and the events so far are
replayed and their operations, which were carried out long ago, dropped.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import RowMapping, select

from zerolab.searcher import Operation, Searcher, make_searcher
from zeroserver.orchestrator.desk import World, find
from zeroserver.store.database import Transaction
from zeroserver.store.schema import experiments, searcher_events

__all__ = ["Event", "first_operations", "progress", "tell"]


_INSERT = searcher_events.insert()


class Event(NamedTuple):
    """Something that the searcher must know."""

    kind: str
    """``created``, ``validated``, ``exited`` or ``exited_early``."""
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
    return _apply(searcher, event)


def progress(world: World, transaction: Transaction, experiment_id: int) -> float:
    """How much of the search is done, 0 to 1."""
    return _find(world, transaction, experiment_id).progress()


def _find(world: World, transaction: Transaction, experiment_id: int) -> Searcher:
    searcher = world.searchers.get(experiment_id)
    if searcher is None:
        searcher = _make(world, transaction, experiment_id)
        searcher.initial_operations()
        columns = searcher_events.c
        stored = transaction.connection.execute(
            select(columns.kind, columns.request_id, columns.value, columns.length, columns.reason)
            .where(columns.experiment_id == experiment_id)
            .order_by(columns.id)
        )
        for row in stored:
            _apply(searcher, Event(*row))
    _keep(world, transaction, experiment_id, searcher)
    return searcher


def _make(world: World, transaction: Transaction, experiment_id: int) -> Searcher:
    row: RowMapping = find(transaction, experiments, experiment_id)
    config = world.config(transaction, experiment_id)
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
    return searcher.trial_exited_early(event.request_id, event.reason or "errored")
