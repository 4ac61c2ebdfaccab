"""Service of custom searchers: delivery of events, execution of operations."""

from collections.abc import Collection, Sequence

import msgspec

from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Continue, Create, ExternalSearcher, Operation, Shutdown, Stop
from zeroserver.orchestrator.lifecycle import LifecycleService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import Event, SearchService, newest_event
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import EXPERIMENT_ENDED, EXPERIMENT_STOPPING
from zeroserver.store.rows import ExperimentRow
from zeroserver.store.schema import experiments

__all__ = ["Answered", "CustomSearchService"]


class Answered(msgspec.Struct, frozen=True):
    """Operations of an external program and the events that they handle."""

    after: int
    """Last event handled before; -1 before the first operations."""
    handled: int
    """Last event handled by these operations; 0 for the first operations."""
    operations: Sequence[Operation]
    progress: float | None = None
    """Progress of the search, from 0 to 1."""


_CREATED_SINCE = (
    "SELECT t.request_id, t.hparams, t.seed FROM searcher_events e JOIN trials t "
    "ON t.experiment_id = e.experiment_id AND t.request_id = e.request_id "
    "WHERE e.experiment_id = ? AND e.kind = 'created' AND e.id > (SELECT coalesce(max(id), 0) "
    "FROM searcher_events WHERE experiment_id = ? AND kind = 'operated')"
)


class CustomSearchService(Service):
    """Executes the operations that programs send for their searches."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)

    def handled(self, experiment_id: int) -> int:
        """Return the last handled event; -1 before the first operations.

        Raises:
            ConflictError: If the searcher is not a custom one.
        """
        return self._outside(experiment_id).handled

    def _outside(self, experiment_id: int) -> ExternalSearcher:
        """Return a custom searcher, and record that a program serves it."""
        searcher = self.searches.searcher(experiment_id)
        if not isinstance(searcher, ExternalSearcher):
            msg = f"experiment {experiment_id}: its searcher accepts no external operations"
            raise ConflictError(msg)
        self.work.orchestrator.searches.served[experiment_id] = self.work.steady()
        return searcher

    def take_operations(
        self, experiment_id: int, answered: Answered, start: int = 0
    ) -> tuple[int, int | None]:
        """Execute operations that handle some events, as many as fit into one transaction.

        The events count as handled after the last operation. An interrupted program sends the same
        operations again; executed ones are not repeated.

        Args:
            experiment_id: Experiment of the searcher.
            answered: All operations.
            start: Number of operations executed by earlier transactions.

        Returns:
            The last handled event, and the number of executed operations; None for all.

        Raises:
            ConfigError: If operations are invalid; none is executed, and the error lists them.
            ConflictError: If events in between were not handled, or the searcher is not custom.
        """
        searcher = self._outside(experiment_id)
        experiment = self.work.find(ExperimentRow, experiment_id)
        ended = experiment.state in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
        if answered.after < searcher.handled or ended or experiment.searcher_done:
            return searcher.handled, None
        if answered.after > searcher.handled:
            msg = (
                f"after: must be {searcher.handled}, the event answered last, got {answered.after}"
            )
            raise ConflictError(msg)
        done: set[int] = set()
        if experiment.creating:
            done = self._done_before(experiment_id, answered.operations[start:])
        if start == 0:  # else already checked
            self._check(experiment_id, answered, done)
        places = [
            index
            for index, operation in enumerate(answered.operations)
            if index >= start and not (isinstance(operation, Create) and operation.trial_id in done)
        ]
        operations = [answered.operations[index] for index in places]
        remaining = self.operations.execute_some(experiment_id, operations)
        creating = int(bool(remaining))
        if creating != experiment.creating:
            self.work.save(experiments, experiment_id, creating=creating)
        if remaining:
            self.scheduling.schedule()
            return searcher.handled, places[len(places) - len(remaining)]
        event = Event("operated", 0, answered.progress, float(answered.handled))
        self.searches.add_event(experiment_id, event)
        if answered.progress is not None:
            self.work.save(
                experiments,
                experiment_id,
                progress=max(experiment.progress, answered.progress),
            )
        self.lifecycle.settle(experiment_id)
        self.scheduling.schedule()
        return answered.handled, None

    def _done_before(self, experiment_id: int, operations: Sequence[Operation]) -> set[int]:
        """Return the trials that an interrupted request has created for these operations."""
        operation = {row.trial_id: row for row in operations if isinstance(row, Create)}
        if not operation:
            return set()
        rows = self.work.raw(_CREATED_SINCE, (experiment_id, experiment_id))
        return {
            number
            for number, hparams, seed in rows
            if number in operation
            and operation[number].trial_seed == seed
            and msgspec.json.encode(operation[number].hparams).decode() == hparams
        }

    def _check(
        self,
        experiment_id: int,
        answered: Answered,
        done: Collection[int],
    ) -> None:
        full_length = self.work.config(experiment_id).searcher.length
        created = set(self.searches.created_trials(experiment_id)).difference(done)
        problems = []
        newest = newest_event(self.work.connection, experiment_id)
        if not answered.after <= answered.handled <= newest:
            text = f"must be an event from {max(answered.after, 0)} to {newest}, the newest one"
            problems.append(f"handled: {text}, got {answered.handled}")
        for index, operation in enumerate(answered.operations):
            key = f"operations[{index}]"
            if isinstance(operation, Create):
                if operation.trial_id in created:
                    text = f"must be a number that no trial has, got {operation.trial_id}"
                    problems.append(f"{key}.trial_id: {text}")
                if operation.source is not None and operation.source not in created:
                    text = f"must be the number of a trial that was created, got {operation.source}"
                    problems.append(f"{key}.source: {text}")
                created.add(operation.trial_id)
            elif isinstance(operation, Stop | Continue) and operation.trial_id not in created:
                text = f"must be the number of a trial that was created, got {operation.trial_id}"
                problems.append(f"{key}.trial_id: {text}")
            if isinstance(operation, Continue) and full_length and operation.until > full_length:
                text = f"must be at most the trial's length of {full_length}, got {operation.until}"
                problems.append(f"{key}.until: {text}")
            if isinstance(operation, Shutdown) and index < len(answered.operations) - 1:
                problems.append(
                    f"{key}: must be the last operation, got {len(answered.operations)} of them"
                )
        if problems:
            raise ConfigError("operations", problems)
