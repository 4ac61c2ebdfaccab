"""State changes of experiments and trials, and the columns and counts derived from them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace
from sqlalchemy import ColumnElement, func, select, text, update

from zeroserver.orchestrator.checkpoints.checkpoint_service import CheckpointService
from zeroserver.orchestrator.ingest.media_service import MediaService
from zeroserver.orchestrator.orphans import OrphanService
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import EventKind, Service, Uses
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_MOVES,
    EXPERIMENT_STOPPING,
    TRIAL_ENDED,
    TRIAL_MOVES,
    TRIAL_OPEN,
    ExperimentState,
    TrialState,
    check_move,
)
from zeroserver.store.rows import ExperimentRow, TrialRow
from zeroserver.store.schema import WEIGHTS_MISSING, experiments, trials

__all__ = [
    "PAUSED",
    "PAUSED_BY_EXPERIMENT",
    "HasState",
    "LifecycleService",
    "exit_cause",
    "resting_state",
    "stop_reason",
]

PAUSED_BY_EXPERIMENT = (
    (trials.c.state == TrialState.PAUSED) & (trials.c.waits == 0) & (trials.c.held == 0)
)
"""Condition for trials that were paused with their experiment, not by the searcher or a user."""
_IDLE_AT_ONCE = 8000
"""Maximum number of trials without a run that one transaction moves."""

_ENDS_AS = {
    ExperimentState.STOPPING_CANCELED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_KILLED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_ERROR: ExperimentState.ERROR,
    ExperimentState.STOPPING_COMPLETED: ExperimentState.COMPLETED,
}
_ENDED_EVENTS: dict[ExperimentState, EventKind] = {
    ExperimentState.COMPLETED: "finished",
    ExperimentState.CANCELED: "canceled",
    ExperimentState.ERROR: "failed",
}
_REMOVE_TRIAL = (
    "DELETE FROM run_nodes WHERE run_id IN (SELECT id FROM runs WHERE trial_id = ?)",
    "DELETE FROM checkpoints WHERE trial_id = ?",
    "DELETE FROM runs WHERE trial_id = ?",
    "DELETE FROM trials WHERE id = ?",
)
_COUNTED = (TrialState.ERROR, TrialState.CANCELED)
_COUNT = (
    "UPDATE experiments SET failed_trials = failed_trials + ?, "
    "canceled_trials = canceled_trials + ? WHERE id = ?"
)
_REOPEN = (
    "UPDATE trials SET state = ?, stop = NULL, held = 0, error = NULL, ended_at = NULL, "
    "restart_at = NULL, archived = 0, restarts = 0, latest_checkpoint = coalesce("
    "latest_checkpoint, (SELECT uuid FROM checkpoints WHERE trial_id = trials.id "
    "AND state = 'COMPLETED' ORDER BY steps_completed DESC, id DESC LIMIT 1)) WHERE id = ?"
)


class HasState(Protocol):
    """Trial with its id and state."""

    @property
    def id(self) -> int:
        """Number of the trial."""

    @property
    def state(self) -> str:
        """State of the trial."""

    @property
    def waits(self) -> int:
        """Whether the searcher has paused it (0 or 1)."""


class LifecycleService(Service):
    """Moves, reopens, counts and deletes the rows of experiments and trials."""

    checkpoints = Uses(CheckpointService)
    media = Uses(MediaService)
    orphans = Uses(OrphanService)
    warm_starts = Uses(WarmStartService)

    def move_experiment(
        self, experiment: ExperimentRow, state: ExperimentState, **values: Any
    ) -> None:
        """Change an experiment's state and other columns; a new state resets its wait for slots.

        Raises:
            ConflictError: If the transition is not legal.
        """
        if experiment.state != state:
            name = f"experiment {experiment.id}"
            check_move(EXPERIMENT_MOVES, name, experiment.state, state)
            values["waits_since"] = None
        self.work.save(experiments, experiment.id, state=state, **values)
        self.work.touch("experiment", experiment.id, experiment.id)

    def settle(self, experiment_id: int) -> None:
        """End an experiment that stops or whose searcher is done, if all its trials have ended."""
        experiment = self.work.find(ExperimentRow, experiment_id)
        if experiment.state in EXPERIMENT_ENDED:
            return
        stopping = experiment.state in EXPERIMENT_STOPPING
        if not (stopping or experiment.searcher_done):  # before the query
            return
        of_experiment = select(trials.c.state).where(trials.c.experiment_id == experiment_id)
        is_open = of_experiment.where(trials.c.state.in_(TRIAL_OPEN)).limit(1)
        if self.work.connection.scalar(is_open) is not None:
            return
        self.checkpoints.apply_to_experiment(experiment_id)
        stopping_state = ExperimentState(experiment.state)
        if not stopping:
            stopping_state = _stopping_state(
                set(self.work.connection.scalars(of_experiment.distinct()))
            )
            self.move_experiment(experiment, stopping_state)
        end = _ENDS_AS[stopping_state]
        values: dict[str, Any] = {"ended_at": self.work.clock()}
        if end == ExperimentState.COMPLETED:
            values["progress"] = 1.0
            without_result = experiment.best_validation is None
            values["error"] = self._last_error(experiment_id) if without_result else None
        elif not stopping and end == ExperimentState.ERROR:
            values["error"] = self._last_error(experiment_id)
        self.move_experiment(replace(experiment, state=stopping_state), end, **values)
        self.work.emit(_ENDED_EVENTS[end], experiment_id)
        self.work.orchestrator.searches.searchers.pop(experiment_id, None)
        self.work.orchestrator.configs.forget(experiment_id)
        self.work.orchestrator.queue.drop([experiment_id])
        self.mark_unapplied(experiment_id, unapplied=False)

    def _last_error(self, experiment_id: int) -> str | None:
        query = (
            select(trials.c.error)
            .where(trials.c.experiment_id == experiment_id, trials.c.error.is_not(None))
            .order_by(trials.c.ended_at.desc(), trials.c.id.desc())
            .limit(1)
        )
        error: str | None = self.work.connection.scalar(query)
        return error

    def count_trials(self, experiment: ExperimentRow) -> None:
        """Recount an experiment's trials and determine the best one, after a deletion."""
        of_experiment = trials.c.experiment_id == experiment.id
        value = trials.c.best_validation
        best = self.work.connection.execute(
            select(trials.c.id, value)
            .where(of_experiment, value.is_not(None))
            .order_by(value.asc() if experiment.smaller_is_better else value.desc(), trials.c.id)
            .limit(1)
        ).first()
        self.work.save(
            experiments, experiment.id,
            num_trials=self.work.connection.scalar(select(func.count()).where(of_experiment)),
            failed_trials=self.count_in(experiment.id, TrialState.ERROR),
            canceled_trials=self.count_in(experiment.id, TrialState.CANCELED),
            best_trial_id=best.id if best else None,
            best_validation=best.best_validation if best else None,
        )  # fmt: skip

    def count_in(self, experiment_id: int, state: TrialState) -> int:
        """Return the number of an experiment's trials in a state."""
        query = "SELECT count(*) FROM trials WHERE state = ? AND experiment_id = ?"
        return int(self.work.raw(query, (str(state), experiment_id))[0][0])

    def move_trial(self, trial: TrialRow, state: TrialState, **values: Any) -> None:
        """Change a trial's state and other columns.

        Raises:
            ConflictError: If the transition is not legal.
        """
        if trial.state != state:
            check_move(TRIAL_MOVES, f"trial {trial.id}", trial.state, state)
            self._count_moves(trial.experiment_id, [(trial.state, state)])
        self.work.save(trials, trial.id, state=state, **values)
        self.work.touch("trial", trial.experiment_id, trial.id)
        if state == TrialState.ERROR:
            error = values.get("error") or trial.error or ""
            self.work.emit("trial_failed", trial.experiment_id, trial.id, text=error)
        if state in TRIAL_ENDED or state == TrialState.PAUSED:
            self.warm_starts.settle_sources(trial.id)

    def _count_moves(self, experiment_id: int, moves: Iterable[tuple[str, str]]) -> None:
        """Update an experiment's numbers of failed and canceled trials.

        Args:
            experiment_id: Experiment of the trials.
            moves: State of each trial before and after.
        """
        changes = dict.fromkeys(_COUNTED, 0)
        for before, after in moves:
            for state in _COUNTED:
                changes[state] += (after == state) - (before == state)
        if any(changes.values()):
            self.work.run(_COUNT, (*changes.values(), experiment_id))

    def reopen(self, trial: TrialRow, experiment_state: str, **values: Any) -> None:
        """Queue or pause an ended trial again, with its restarts reset.

        Args:
            trial: Ended trial.
            experiment_state: New state of its experiment.
            values: Other columns to change.
        """
        latest = trial.latest_checkpoint or self.warm_starts.newest_checkpoint(trial.id)
        state = resting_state(experiment_state, waits=values.get("waits", trial.waits))
        self.move_trial(
            trial, state, stop=None, held=0, error=None, ended_at=None, restart_at=None,
            archived=0, restarts=0, latest_checkpoint=latest, **values,
        )  # fmt: skip

    def reopen_all(
        self,
        experiment_id: int,
        ended: Sequence[HasState],
        state: str,
    ) -> None:
        """Reopen many ended trials with few statements, as :meth:`reopen` does for one.

        Args:
            experiment_id: Their experiment.
            ended: The trials.
            state: New state of the experiment.
        """
        by_state: dict[TrialState, list[int]] = {}
        moves: list[tuple[str, str]] = []
        for trial in ended:
            new_state = resting_state(state, waits=trial.waits)
            check_move(TRIAL_MOVES, f"trial {trial.id}", trial.state, new_state)
            by_state.setdefault(new_state, []).append(trial.id)
            moves.append((trial.state, new_state))
        self._count_moves(experiment_id, moves)
        self.work.touch_trials(experiment_id, (trial.id for trial in ended))
        for new_state, ids in by_state.items():
            self.work.many(_REOPEN, [(str(new_state), number) for number in ids])
        waiting = select(trials.c.source_trial_id).where(text(WEIGHTS_MISSING))
        paused = set(by_state.get(TrialState.PAUSED, ()))
        for source in paused.intersection(self.work.connection.scalars(waiting)):
            self.warm_starts.settle_sources(source)

    def mark_unapplied(self, experiment_id: int, *, unapplied: bool) -> None:
        """Mark whether an experiment's state must still be applied to some of its trials."""
        marked = self.work.orchestrator.queue.unapplied
        if (experiment_id in marked) != unapplied:
            marked.symmetric_difference_update({experiment_id})
            self.work.undo.append(partial(marked.symmetric_difference_update, {experiment_id}))

    def move_idle(self, experiment: ExperimentRow) -> bool:
        """Move some trials without a run to the state that their experiment's state requires.

        Returns:
            Whether more trials may be left for another transaction.
        """
        which: ColumnElement[bool] = trials.c.state == TrialState.QUEUED
        values: dict[str, Any] = {"state": TrialState.PAUSED}
        stopping = experiment.state in EXPERIMENT_STOPPING
        if stopping:
            which = trials.c.state.in_([TrialState.QUEUED, TrialState.PAUSED])
            values = {
                "state": TrialState.CANCELED, "stop": stop_reason(experiment.state),
                "restart_at": None, "ended_at": self.work.clock(),
            }  # fmt: skip
        elif experiment.state == ExperimentState.ACTIVE:
            which, values = PAUSED_BY_EXPERIMENT, {"state": TrialState.QUEUED}
        some = select(trials.c.id).where(
            trials.c.experiment_id == experiment.id, trials.c.run_id.is_(None), which
        )
        change = update(trials).where(trials.c.id.in_(some.limit(_IDLE_AT_ONCE))).values(values)
        ids = self.work.connection.scalars(change.returning(trials.c.id)).all()
        self.work.touch_trials(experiment.id, ids)
        if stopping:
            self.work.run(_COUNT, (0, len(ids), experiment.id))
        return len(ids) == _IDLE_AT_ONCE

    def remove_trials(self, experiment_id: int, trial_ids: Sequence[int]) -> None:
        """Delete trials of an experiment with their runs, media and checkpoint rows."""
        self.media.remove_files(experiment_id, trial_ids)
        self.orphans.add(trial_ids)
        keys = [(trial_id,) for trial_id in trial_ids]
        for statement in _REMOVE_TRIAL:
            self.work.many(statement, keys)


def _stopping_state(states: set[str]) -> ExperimentState:
    """Return the stopping state of an experiment from the final states of its trials."""
    if states == {TrialState.ERROR}:
        return ExperimentState.STOPPING_ERROR
    if states == {TrialState.CANCELED}:
        return ExperimentState.STOPPING_CANCELED
    return ExperimentState.STOPPING_COMPLETED


def stop_reason(experiment_state: str) -> str:
    """Return why the trials of a stopping experiment are stopped."""
    return "cancel" if experiment_state == ExperimentState.STOPPING_CANCELED else "kill"


class CanExit(Protocol):
    """Trial, or a row with the columns that say why its run was asked to exit."""

    @property
    def stop(self) -> str | None:
        """Why the trial must end, or None."""

    @property
    def held(self) -> int:
        """Whether a user has paused the trial."""

    @property
    def waits(self) -> int:
        """Whether the searcher has paused the trial."""


PAUSED = "paused"
"""First word of the reasons of runs that exited because a user or the searcher paused the trial."""
_STOP_CAUSES = {"searcher": "stopped by the searcher", "cancel": "canceled", "kill": "killed"}


def exit_cause(trial: CanExit, experiment_state: str) -> str | None:
    """Return why a run was asked to exit, for users; None if other work needs its slots.

    Args:
        trial: The trial of the run.
        experiment_state: State of its experiment.
    """
    if trial.stop is not None:
        return _STOP_CAUSES.get(trial.stop)
    if trial.held:
        return PAUSED
    if experiment_state == ExperimentState.PAUSED:
        return f"{PAUSED} with its experiment"
    return f"{PAUSED} by the searcher" if trial.waits else None


def resting_state(experiment_state: str, *, waits: int) -> TrialState:
    """Return the state of an open trial without a run: queued or paused.

    Args:
        experiment_state: State of its experiment; its trials are paused while it is not active.
        waits: Whether the searcher or a user has paused the trial.
    """
    active = experiment_state == ExperimentState.ACTIVE
    return TrialState.QUEUED if active and not waits else TrialState.PAUSED
