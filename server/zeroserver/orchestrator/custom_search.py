"""Searchers that decide outside of the server: their events out, their operations in."""

from collections.abc import Sequence
from dataclasses import dataclass

from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Continue, Create, Operation, ServedOutside, Shutdown, Stop
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.desk import World, find
from zeroserver.orchestrator.experiments import settle_experiment
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.searching import Event
from zeroserver.orchestrator.trials import carry_out
from zeroserver.states import EXPERIMENT_ENDED, EXPERIMENT_STOPPING
from zeroserver.store.database import Transaction
from zeroserver.store.schema import experiments

__all__ = ["Answered", "handled", "take_operations"]


def handled(world: World, transaction: Transaction, experiment_id: int) -> int:
    """The last event that was answered; -1 before the first operations.

    Raises:
        ConflictError: If the searcher decides by itself.
    """
    return _outside(world, transaction, experiment_id).handled


def _outside(world: World, transaction: Transaction, experiment_id: int) -> ServedOutside:
    """Return the searcher that a program outside asks for, and note that it is there."""
    searcher = searching.searcher_of(world, transaction, experiment_id)
    if not isinstance(searcher, ServedOutside):
        msg = f"experiment {experiment_id}: its searcher decides by itself and takes no operations"
        raise ConflictError(msg)
    world.served[experiment_id] = world.steady()
    return searcher


@dataclass(frozen=True)
class Answered:
    """Operations from outside, and which events they answer."""

    after: int
    """The last event that was answered before; -1 before the first operations."""
    handled: int
    """The last event that is answered now; 0 for the first operations."""
    operations: Sequence[Operation]
    progress: float | None = None
    """How far the search is, from 0 to 1."""


def take_operations(
    world: World, transaction: Transaction, experiment_id: int, told: Answered
) -> int:
    """Carry out the operations that answer some events; saying it again changes nothing.

    Returns:
        The last event that is answered by now.

    Raises:
        ConfigError: With every operation that cannot be carried out; none of them is then.
        ConflictError: If events between were not answered, or the searcher decides by itself.
    """
    searcher = _outside(world, transaction, experiment_id)
    experiment = find(transaction, experiments, experiment_id)
    over = experiment["state"] in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
    if told.after < searcher.handled or over or experiment["searcher_done"]:
        return searcher.handled
    if told.after > searcher.handled:
        msg = f"after: must be {searcher.handled}, the event answered last, got {told.after}"
        raise ConflictError(msg)
    _check(world, transaction, experiment_id, told)
    event = Event("operated", 0, told.progress, float(told.handled))
    searching.tell(world, transaction, experiment_id, event)
    carry_out(world, transaction, experiment_id, told.operations)
    settle_experiment(world, transaction, experiment_id)
    schedule(world, transaction)
    return told.handled


def _check(world: World, transaction: Transaction, experiment_id: int, told: Answered) -> None:
    whole = world.config(transaction, experiment_id).searcher.length
    known = searching.created(transaction, experiment_id)
    problems = []
    newest = searching.newest_event(transaction.connection, experiment_id)
    if not told.after <= told.handled <= newest:
        text = f"must be an event from {max(told.after, 0)} to {newest}, the newest one"
        problems.append(f"handled: {text}, got {told.handled}")
    for place, operation in enumerate(told.operations):
        key = f"operations[{place}]"
        if isinstance(operation, Create):
            if operation.trial_id in known:
                text = f"must be a number that no trial has, got {operation.trial_id}"
                problems.append(f"{key}.trial_id: {text}")
            if operation.source is not None and operation.source not in known:
                text = f"must be the number of a trial that was created, got {operation.source}"
                problems.append(f"{key}.source: {text}")
            known.add(operation.trial_id)
        elif isinstance(operation, Stop | Continue) and operation.trial_id not in known:
            text = f"must be the number of a trial that was created, got {operation.trial_id}"
            problems.append(f"{key}.trial_id: {text}")
        if isinstance(operation, Continue) and whole and operation.until > whole:
            text = f"must be at most the trial's length of {whole}, got {operation.until}"
            problems.append(f"{key}.until: {text}")
        if isinstance(operation, Shutdown) and place < len(told.operations) - 1:
            problems.append(
                f"{key}: must be the last operation, got {len(told.operations)} of them"
            )
    if problems:
        raise ConfigError("operations", problems)
