"""Operations of searchers: executed in order, a limited number per transaction.

Trials also end here: the searcher responds to the end of a trial with operations, which may end
other trials.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from zerolab.contract.messages import LEAVE_GRACE_S
from zerolab.contract.outcome import is_failure
from zerolab.searcher import Continue, Create, Deferred, Operation, Reopen, Shutdown, Stop
from zeroserver.orchestrator.caches import SearchCache
from zeroserver.orchestrator.checkpoints.checkpoint_service import CheckpointService
from zeroserver.orchestrator.lifecycle import LifecycleService, resting_state
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.search.search_service import DELETED, Event, SearchService
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
)
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow, read_row
from zeroserver.store.schema import experiments, runs, trials

__all__ = ["OperationService", "cost_of", "interrupted_searches"]

_INSERT_TRIAL = (
    "INSERT INTO trials (experiment_id, request_id, state, hparams, seed, created_at, "
    "source_checkpoint, source_trial_id, source_steps, restarts, waits, steps_completed, "
    "progress, searcher_steps, excluded, labels) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, -1, '[]', '[]')"
)
_BUDGET_MS = 60.0
"""Budget of one transaction; see :func:`cost_of`."""


class OperationService(Service):
    """Executes operations of searchers and notifies them when trials end."""

    lifecycle = Uses(LifecycleService)
    runs = Uses(RunService)
    searches = Uses(SearchService)
    checkpoints = Uses(CheckpointService)
    warm_starts = Uses(WarmStartService)

    @property
    def cache(self) -> SearchCache:
        """Searchers and operations that outlive the unit of work."""
        return self.work.orchestrator.searches

    def add_event(self, experiment_id: int, event: Event) -> bool:
        """Add an event and execute the searcher's operations; return whether there were any."""
        operations = self.searches.add_event(experiment_id, event)
        self.execute(experiment_id, operations)
        return bool(operations)

    def execute(self, experiment_id: int, operations: Sequence[Operation]) -> None:
        """Execute operations and the operations that the searcher returns in response.

        Executes only as many as fit into one transaction. The rest goes into the experiment's
        backlog, for :meth:`execute_backlog`. Responses to an operation are queued after all
        pending operations.
        """
        if experiment_id in self.cache.in_progress:
            self.cache.in_progress[experiment_id].extend(operations)
            return
        backlog = self.cache.backlog.get(experiment_id, ())
        now: list[Operation] = []
        later: list[Operation] = []
        waiting = {
            operation.trial_id
            for operation in backlog
            if not isinstance(operation, Shutdown | Deferred)
        }
        for operation in operations:  # dependents of backlogged operations must follow them
            waits = (
                isinstance(operation, Create | Shutdown | Deferred) or operation.trial_id in waiting
            )
            (later if backlog and waits else now).append(operation)
            if isinstance(operation, Create):
                waiting.add(operation.trial_id)
        remaining = (*self.execute_some(experiment_id, now), *backlog, *later)
        self._keep_backlog(experiment_id, remaining)
        if (
            operations
            and not remaining
            and self.work.find(ExperimentRow, experiment_id).searcher_done
        ):
            self.lifecycle.settle(experiment_id)  # its last trial may already have ended

    def drop_backlog(self, experiment_id: int) -> None:
        """Drop the operations of an experiment that were not executed."""
        self._keep_backlog(experiment_id, ())

    def execute_backlog(self) -> bool:
        """Execute a part of the oldest backlog; return whether there was one.

        Backlogs that begin with a deferred operation are left to :meth:`execute_deferred`. Call it
        until it returns False, each time in a new transaction.
        """
        for experiment_id, backlog in self.cache.backlog.items():
            if not isinstance(backlog[0], Deferred):
                self._execute_backlog(experiment_id, backlog)
                return True
        return False

    def next_deferred(self) -> tuple[int, Deferred] | None:
        """Return the next deferred operation to compute, and its experiment."""
        for experiment_id, backlog in self.cache.backlog.items():
            if isinstance(backlog[0], Deferred):
                return experiment_id, backlog[0]
        return None

    def execute_deferred(self, experiment_id: int, deferred: Deferred) -> None:
        """Execute the operations of a deferred one that was computed in another thread."""
        backlog = self.cache.backlog.get(experiment_id, ())
        if backlog[:1] == (deferred,):  # else the experiment has ended since
            self._execute_backlog(experiment_id, (*deferred.operations, *backlog[1:]))

    def _execute_backlog(self, experiment_id: int, backlog: Sequence[Operation]) -> None:
        query = "SELECT state, searcher_done FROM experiments WHERE id = ?"
        rows = self.work.raw(query, (experiment_id,))
        ended = EXPERIMENT_ENDED | EXPERIMENT_STOPPING
        if not rows or rows[0][0] in ended or rows[0][1]:
            self._keep_backlog(experiment_id, ())
            return
        remaining = self.execute_some(experiment_id, backlog)
        self._keep_backlog(experiment_id, remaining)
        if not remaining:
            self.lifecycle.settle(experiment_id)

    def resume_backlog(self, experiment_id: int) -> None:
        """Restore the backlog of a search after its server was killed."""
        experiment = self.work.find(ExperimentRow, experiment_id)
        if experiment.state not in EXPERIMENT_ENDED | EXPERIMENT_STOPPING:
            remaining = self.searches.pending_operations(experiment_id)
            self._keep_backlog(experiment_id, remaining)

    def _keep_backlog(self, experiment_id: int, remaining: Sequence[Operation]) -> None:
        former = self.cache.backlog.get(experiment_id)
        if not remaining and former is None:
            return
        _set_backlog(self.work.orchestrator, experiment_id, tuple(remaining) or None)
        self.work.undo.append(partial(_set_backlog, self.work.orchestrator, experiment_id, former))
        if bool(remaining) != bool(former):
            statement = "UPDATE experiments SET creating = ? WHERE id = ?"
            self.work.run(statement, (int(bool(remaining)), experiment_id))

    def execute_some(
        self, experiment_id: int, operations: Sequence[Operation]
    ) -> Sequence[Operation]:
        """Execute the first operations, as many as fit into one transaction.

        The caller must settle the experiment.

        Returns:
            The remaining operations, including the searcher's responses to the executed ones.
        """
        waiting = deque(operations)
        self.cache.in_progress[experiment_id] = waiting
        try:
            self._execute_first(experiment_id, waiting)
        finally:
            del self.cache.in_progress[experiment_id]
        return waiting

    def _execute_first(self, experiment_id: int, waiting: deque[Operation]) -> None:
        """Execute operations from a queue, as many as fit into one transaction."""
        created, spent = 0, 0.0
        while waiting and spent < _BUDGET_MS:
            operation = waiting.popleft()
            if isinstance(operation, Deferred):
                waiting.appendleft(operation)
                break
            spent += cost_of(operation)
            if isinstance(operation, Create):
                batch = [operation]
                while (
                    operation.source is None
                    and waiting
                    and isinstance(following := waiting[0], Create)
                    and following.source is None
                    and spent < _BUDGET_MS
                ):
                    spent += cost_of(following)
                    batch.append(following)
                    waiting.popleft()
                self._create(experiment_id, batch)
                created += len(batch)
                events = [Event("created", following.trial_id) for following in batch]
                waiting.extend(self.searches.add_events(experiment_id, events))
            elif isinstance(operation, Shutdown):
                if any(not isinstance(following, Shutdown) for following in waiting):
                    waiting.append(operation)  # shut down after all other operations
                    continue
                self.work.save(experiments, experiment_id, searcher_done=1)
            elif (trial := self._requested(experiment_id, operation.trial_id)) is None:
                event = Event("exited_early", operation.trial_id, reason=DELETED)
                waiting.extend(self.searches.add_event(experiment_id, event))
            elif isinstance(operation, Stop):
                if trial.state not in TRIAL_ENDED:
                    self.stop_trial(trial, "searcher")
            elif isinstance(operation, Continue):
                self._continue(trial, operation.until)
            elif isinstance(operation, Reopen):
                self.lifecycle.reopen(trial, ExperimentState.ACTIVE, waits=1)
        experiment = self.work.find(ExperimentRow, experiment_id)
        values: dict[str, Any] = {"num_trials": experiment.num_trials + created}
        if not experiment.searcher_done:  # else it keeps its last value
            done = self.searches.progress(experiment_id)
            values["progress"] = max(experiment.progress, done)
        self.work.save(experiments, experiment_id, **values)
        self.work.touch("experiment", experiment_id, experiment_id)

    def _create(self, experiment_id: int, operations: Sequence[Create]) -> None:
        """Create trials; only trials without a source may be in one batch."""
        query = "SELECT state, source_checkpoint FROM experiments WHERE id = ?"
        ((experiment_state, source),) = self.work.raw(query, (experiment_id,))
        paused = experiment_state == ExperimentState.PAUSED
        state = TrialState.PAUSED if paused else TrialState.QUEUED
        now = self.work.clock()
        ((last,),) = self.work.raw("SELECT coalesce(max(id), 0) FROM trials")
        rows = []
        for operation in operations:
            weights = {"source_checkpoint": source}
            weights |= self.warm_starts.source_of_trial(experiment_id, operation)
            rows.append(
                (
                    experiment_id, operation.trial_id, str(state),
                    msgspec.json.encode(operation.hparams).decode(), operation.trial_seed, now,
                    weights["source_checkpoint"], weights.get("source_trial_id"),
                    weights.get("source_steps"),
                )
            )  # fmt: skip
        self.work.many(_INSERT_TRIAL, rows)
        new = "SELECT id FROM trials WHERE experiment_id = ? AND id > ? ORDER BY id"
        for (trial_id,) in self.work.raw(new, (experiment_id, last)):
            self.work.touch("trial", experiment_id, trial_id)

    def _requested(self, experiment_id: int, request_id: int) -> TrialRow | None:
        """Return the trial with a searcher's request id; None if a user has deleted it."""
        query = select(trials).where(
            trials.c.experiment_id == experiment_id, trials.c.request_id == request_id
        )
        return read_row(self.work.connection, TrialRow, query)

    def _continue(self, trial: TrialRow, until: int) -> None:
        self.work.save(trials, trial.id, until=until, waits=0)
        experiment = self.work.experiment_of(trial)
        if trial.state == TrialState.PAUSED and trial.run_id is None:
            self.lifecycle.move_trial(trial, resting_state(experiment.state, waits=trial.held))

    def stop_trial(self, trial: TrialRow, reason: str) -> None:
        """End a trial at once if it has no run, else after its run has checkpointed.

        Args:
            trial: Trial that has not ended.
            reason: ``searcher``, ``cancel``, ``kill`` or ``error``; the last two do not wait for a
                checkpoint.
        """
        # A stop by the searcher is final.
        if trial.stop != "searcher" or reason == "error":
            self.work.save(trials, trial.id, stop=reason)
        if trial.run_id is None:
            state = TrialState.COMPLETED if reason == "searcher" else TrialState.CANCELED
            error = self._error_of_last_run(trial) if reason == "searcher" else None
            self.end_trial(trial, TrialState.ERROR if error else state, error=error)
            return
        self.lifecycle.move_trial(trial, TrialState.STOPPING)
        if reason in {"kill", "error"}:
            self.runs.kill(trial.run_id)
            return
        self.runs.direct(trial.run_id, "stop")
        run = self.work.find(RunRow, trial.run_id)
        if reason == "cancel" and not run.killed and self.runs.never_asks(run):
            text = (
                f"run {run.id}: its command does not poll for preemption: its processes get "
                f"SIGTERM, and SIGKILL {LEAVE_GRACE_S:.0f} s later"
            )
            self.work.log_line(run, text, "WARNING")
            self.runs.kill(run.id)

    def _error_of_last_run(self, trial: TrialRow) -> str | None:
        """Return why the last run of a trial failed; None if it did not, or the trial never ran."""
        if not trial.restarts:  # each counted failure is a restart, or has ended the trial
            return None
        query = select(runs).where(runs.c.trial_id == trial.id).order_by(runs.c.id.desc()).limit(1)
        last = read_row(self.work.connection, RunRow, query)
        if last is None or last.killed or not is_failure(last.exit_code or 0):
            return None
        return str(last.reason or f"exit code {last.exit_code}")

    def end_trial(
        self,
        trial: TrialRow,
        state: TrialState,
        *,
        error: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Move a trial to a final state and notify the searcher.

        Args:
            trial: Trial that has not ended.
            state: Final state.
            error: One-line message for the user.
            reason: Why it ended early, for the searcher; None if it trained to its length.
        """
        now = self.work.clock()
        values: dict[str, Any] = {
            "run_id": None,
            "restart_at": None,
            "ended_at": now,
            "error": error,
        }
        if state == TrialState.COMPLETED and reason is None and trial.stop is None:
            values["progress"] = 1.0
        self.lifecycle.move_trial(trial, state, **values)
        self.checkpoints.apply_to_trial(trial.id)
        if state != TrialState.COMPLETED and trial.started_at is not None:
            self.checkpoints.discard_unfinished(trial)
        experiment = self.work.experiment_of(trial)
        ended = experiment.state in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
        if not ended and not experiment.searcher_done:
            if state == TrialState.COMPLETED and reason is None:
                event = Event("exited", trial.request_id)
            else:
                default = "errored" if state == TrialState.ERROR else "user_canceled"
                event = Event("exited_early", trial.request_id, reason=reason or default)
            self.add_event(trial.experiment_id, event)
        self.lifecycle.settle(trial.experiment_id)


def interrupted_searches(connection: Connection) -> list[int]:
    """Return the running searches whose operations a killed server did not all execute."""
    query = select(experiments.c.id).where(
        experiments.c.creating == 1,
        experiments.c.searcher_name != "custom",  # its program sends the operations again
        experiments.c.state.not_in(EXPERIMENT_ENDED | EXPERIMENT_STOPPING),
    )
    return list(connection.scalars(query.order_by(experiments.c.id)))


def _set_backlog(
    orchestrator: Orchestrator, experiment_id: int, remaining: tuple[Operation, ...] | None
) -> None:
    if remaining is None:
        orchestrator.searches.backlog.pop(experiment_id, None)
    else:
        orchestrator.searches.backlog[experiment_id] = remaining


def cost_of(operation: Operation) -> float:
    """Return the approximate cost of an operation, in milliseconds of the writer."""
    if isinstance(operation, Create):
        return 0.1 if operation.source is None else 1.5
    return 0.7 if isinstance(operation, Continue) else 3.0
