"""Trials: state changes, user actions, end and deletion."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, text, update

from zerolab.contract.messages import LEAVE_GRACE_S
from zerolab.contract.outcome import is_failure
from zerolab.errors import ConflictError
from zeroserver.orchestrator.search.search_service import Event
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_ACTIONS,
    TRIAL_ENDED,
    TRIAL_MOVES,
    ExperimentState,
    TrialState,
    check_move,
)
from zeroserver.store.rows import RunRow, TrialRow, read_row
from zeroserver.store.schema import WEIGHTS_MISSING, checkpoints, runs, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    pass

__all__ = ["TrialService", "resting_state"]

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


class TrialService(Service):
    """Moves, stops, ends, reopens and deletes trials."""

    def act(self, trial_id: int, action: str) -> None:
        """Pause, activate, cancel, kill, archive or unarchive one trial; twice changes nothing.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If its state, or its experiment's, does not allow it.
        """
        trial = self.work.find(TrialRow, trial_id)
        rule, state = TRIAL_ACTIONS[action], trial.state
        ended = state in TRIAL_ENDED and state in rule.instead
        remedy = self.work.continuations.remedy(trial) if ended else None
        if rule.wanted("trial", trial_id, state, remedy):
            actions = {
                "pause": self._pause,
                "activate": self._activate,
                "cancel": self._cancel,
                "kill": self._kill,
                "archive": self._archive,
                "unarchive": self._unarchive,
            }
            actions[action](trial)
            self.work.touch("trial", trial.experiment_id, trial_id)
            self.work.scheduling.schedule()

    def _pause(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, held=1)
        if trial.run_id is not None:
            self.work.runs.direct(trial.run_id, "preempt")
        else:
            self.move(trial, TrialState.PAUSED)

    def _activate(self, trial: TrialRow) -> None:
        """Undo a pause of one trial; refuse if something else has it wait."""
        experiment = self.work.experiment_of(trial)
        number, experiment_id = trial.id, experiment.id
        if trial.run_id is None and experiment.state != ExperimentState.ACTIVE:
            msg = (
                f"trial {number}: its experiment {experiment_id} is {experiment.state}; "
                f"`zerolab experiment activate {experiment_id}` first"
            )
            raise ConflictError(msg)
        if trial.run_id is None and trial.waits and not trial.held:
            msg = (
                f"trial {number}: waits for the searcher, "
                "which lets it go on if it is among the best; "
                f"to train it by itself, `zerolab trial fork {number}`"
            )
            raise ConflictError(msg)
        self.work.save(trials, number, held=0)
        if trial.run_id is None:
            self.move(trial, resting_state(ExperimentState.ACTIVE, waits=trial.waits))

    def _cancel(self, trial: TrialRow) -> None:
        self.stop(trial, "cancel")

    def _kill(self, trial: TrialRow) -> None:
        self.stop(trial, "kill")

    def _archive(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, archived=1)

    def _unarchive(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, archived=0)

    def remove_rows(self, trial_ids: Sequence[int]) -> None:
        """Delete trials and their runs, after their checkpoints."""
        self._delete_points_later(trial_ids)
        keys = [(trial_id,) for trial_id in trial_ids]
        for statement in _REMOVE_TRIAL:
            self.work.many(statement, keys)

    def remove(self, trial_id: int) -> bool:
        """Delete a trial of an experiment that has ended, with its metrics, logs and checkpoints.

        Of a trial with very many checkpoints only some of them are deleted: call it again.

        The events of its searcher stay, so that the trial is not created again if the experiment
        is continued; the searcher then learns that it will not come back.

        Returns:
            Whether all of it is deleted.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If it or its experiment has not ended, a trial of another one begins with
                a checkpoint of it, or one of them is registered.
        """
        trial = self.work.find(TrialRow, trial_id)
        TRIAL_ACTIONS["delete"].wanted("trial", trial_id, trial.state)
        experiment = self.work.experiment_of(trial)
        experiment_id, state = experiment.id, experiment.state
        if state not in EXPERIMENT_ENDED:
            msg = (
                f"trial {trial_id}: its experiment {experiment_id} is {state}, "
                "and the searcher still counts on "
                f"it; `zerolab trial archive {trial_id}` hides it until that has ended"
            )
            raise ConflictError(msg)
        whose = checkpoints.c.trial_id == trial_id
        self.work.warm_starts.refuse_while_needed(f"trial {trial_id}", whose)
        self.work.models.refuse_while_registered(f"trial {trial_id}", whose)
        self.work.touch("trial", experiment_id, trial_id)
        self.work.touch("experiment", experiment_id, experiment_id)
        if self.work.checkpoints.delete_some(experiment_id, whose):
            return False
        self.work.warm_starts.forget_source(trial_id)
        self.remove_rows([trial_id])
        self.work.experiments.count_trials(experiment)
        return True

    def _delete_points_later(self, trial_ids: Sequence[int]) -> None:
        """Schedule the points and logs of deleted trials for removal in later changes.

        Nobody finds them without their trials. What a server that dies leaves of them, the next one
        removes at its start.
        """
        self.work.orchestrator.deletions.orphans.extend(trial_ids)
        for trial_id in trial_ids:
            self.work.orchestrator.metrics.reported.pop(trial_id, None)
        self.work.undo.append(
            partial(_keep_from_sweep, self.work.orchestrator, frozenset(trial_ids))
        )

    def move(self, trial: TrialRow, state: TrialState, **values: Any) -> None:
        """Change a trial's state, and other columns with it.

        Raises:
            ConflictError: If the transition is not legal.
        """
        if trial.state != state:
            check_move(TRIAL_MOVES, f"trial {trial.id}", trial.state, state)
            self._count_moves(trial.experiment_id, [(trial.state, state)])
        self.work.save(trials, trial.id, state=state, **values)
        self.work.touch("trial", trial.experiment_id, trial.id)
        if state in TRIAL_ENDED or state == TrialState.PAUSED:
            self.work.warm_starts.settle_sources(trial.id)

    def _count_moves(self, experiment_id: int, moves: Iterable[tuple[str, str]]) -> None:
        """Update an experiment's numbers of failed and canceled trials.

        Args:
            experiment_id: Whose trials move.
            moves: State before and after, of each trial.
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
            trial: One that has ended.
            experiment_state: Of its experiment, from now on.
            values: Other columns that change.
        """
        latest = trial.latest_checkpoint or self.work.warm_starts.newest_checkpoint(trial.id)
        state = resting_state(experiment_state, waits=values.get("waits", trial.waits))
        self.move(
            trial, state, stop=None, held=0, error=None, ended_at=None, restart_at=None,
            archived=0, restarts=0, latest_checkpoint=latest, **values,
        )  # fmt: skip

    def reopen_all(
        self,
        experiment_id: int,
        ended: Sequence[TrialRow],
        state: str,
    ) -> None:
        """Reopen many ended trials with few statements, as :meth:`reopen` does for one.

        Args:
            experiment_id: Their experiment.
            ended: The trials.
            state: Of the experiment, from now on.
        """
        by_state: dict[TrialState, list[int]] = {}
        moves: list[tuple[str, str]] = []
        for trial in ended:
            to = resting_state(state, waits=trial.waits)
            check_move(TRIAL_MOVES, f"trial {trial.id}", trial.state, to)
            by_state.setdefault(to, []).append(trial.id)
            moves.append((trial.state, to))
        self._count_moves(experiment_id, moves)
        self.work.touch_trials(experiment_id, (trial.id for trial in ended))
        for to, ids in by_state.items():
            self.work.many(_REOPEN, [(str(to), number) for number in ids])
        waiting = select(trials.c.source_trial_id).where(text(WEIGHTS_MISSING))
        paused = set(by_state.get(TrialState.PAUSED, ()))
        for source in paused.intersection(self.work.connection.scalars(waiting)):
            self.work.warm_starts.settle_sources(source)

    def stop(self, trial: TrialRow, reason: str) -> None:
        """End a trial: at once when no run of it is there, else when its run has checkpointed.

        Args:
            trial: One that has not ended.
            reason: ``searcher``, ``cancel``, ``kill`` or ``error``; the last two do not wait for a
                checkpoint.
        """
        # A stop by the searcher is final.
        if trial.stop != "searcher" or reason == "error":
            self.work.save(trials, trial.id, stop=reason)
        if trial.run_id is None:
            state = TrialState.COMPLETED if reason == "searcher" else TrialState.CANCELED
            error = self._error_of_last_run(trial) if reason == "searcher" else None
            self.end(trial, TrialState.ERROR if error else state, error=error)
            return
        self.move(trial, TrialState.STOPPING)
        if reason in {"kill", "error"}:
            self.work.runs.kill(trial.run_id)
            return
        self.work.runs.direct(trial.run_id, "stop")
        run = self.work.find(RunRow, trial.run_id)
        if reason == "cancel" and not run.killed and self.work.runs.never_asks(run):
            text = (
                f"run {run.id}: its command does not ask whether to leave: its processes get "
                f"SIGTERM, and SIGKILL {LEAVE_GRACE_S:.0f} s later"
            )
            self.work.log_line(run, text, "WARNING")
            self.work.runs.kill(run.id)

    def _error_of_last_run(self, trial: TrialRow) -> str | None:
        """Return why the last run of a trial failed; None if it did not, or the trial never ran."""
        if not trial.restarts:  # every failure counts as one, or has ended the trial
            return None
        query = select(runs).where(runs.c.trial_id == trial.id).order_by(runs.c.id.desc()).limit(1)
        last = read_row(self.work.connection, RunRow, query)
        if last is None or last.killed or not is_failure(last.exit_code or 0):
            return None
        return str(last.reason or f"exit code {last.exit_code}")

    def cancel_idle(self, experiment_id: int, reason: str) -> None:
        """Cancel all trials without a run of a stopping experiment; there may be thousands."""
        idle = (
            trials.c.experiment_id == experiment_id,
            trials.c.run_id.is_(None),
            trials.c.state.in_([TrialState.QUEUED, TrialState.PAUSED]),
        )
        trial_ids = list(self.work.connection.scalars(select(trials.c.id).where(*idle)))
        self.work.connection.execute(
            update(trials)
            .where(*idle)
            .values(
                state=TrialState.CANCELED, stop=reason, restart_at=None, ended_at=self.work.clock()
            )
        )
        self.work.touch_trials(experiment_id, trial_ids)
        moves = [(TrialState.QUEUED, TrialState.CANCELED)] * len(trial_ids)
        self._count_moves(experiment_id, moves)
        if trial_ids:
            self.work.checkpoints.apply_to_experiment(experiment_id)

    def end(
        self,
        trial: TrialRow,
        state: TrialState,
        *,
        error: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Move a trial to a final state and notify the searcher.

        Args:
            trial: One that has not ended.
            state: A final one.
            error: One line for the user.
            reason: Why it ended early, for the searcher; None when it has done all it should.
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
        self.move(trial, state, **values)
        self.work.checkpoints.apply_to_trial(trial.id)
        if state != TrialState.COMPLETED and trial.started_at is not None:
            self.work.checkpoints.discard_unfinished(trial)
        experiment = self.work.experiment_of(trial)
        ended = experiment.state in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
        if not ended and not experiment.searcher_done:
            if state == TrialState.COMPLETED and reason is None:
                event = Event("exited", trial.request_id)
            else:
                default = "errored" if state == TrialState.ERROR else "user_canceled"
                event = Event("exited_early", trial.request_id, reason=reason or default)
            self.work.operations.add_event(trial.experiment_id, event)
        self.work.experiments.settle(trial.experiment_id)


def _keep_from_sweep(orchestrator: Orchestrator, trial_ids: frozenset[int]) -> None:
    remaining = [
        trial_id for trial_id in orchestrator.deletions.orphans if trial_id not in trial_ids
    ]
    orchestrator.deletions.orphans.clear()
    orchestrator.deletions.orphans.extend(remaining)


def resting_state(experiment_state: str, *, waits: int) -> TrialState:
    """Return the state of a trial without a run that has not ended: queued, unless it must wait.

    Args:
        experiment_state: State of its experiment; trials wait while it is not active.
        waits: Whether the searcher, or a user who paused the trial, has it wait.
    """
    active = experiment_state == ExperimentState.ACTIVE
    return TrialState.QUEUED if active and not waits else TrialState.PAUSED
