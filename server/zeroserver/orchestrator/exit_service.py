"""Exits of runs and their effect on the trial: end, restart, pause or requeue."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import func, select, update

from zerolab.contract.hparam_reads import searched_names
from zerolab.contract.messages import RunExit
from zerolab.contract.names import PORT_LABEL
from zerolab.contract.outcome import BEYOND_BOUND, Outcome, failed_by_peer, is_failure
from zerolab.contract.secret_text import mask_values
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_USER_ERROR,
    RunSpec,
)
from zerolab.errors import NotFoundError
from zeroserver.orchestrator.lifecycle import (
    PAUSED,
    LifecycleService,
    exit_cause,
    resting_state,
)
from zeroserver.orchestrator.log_policies import Match
from zeroserver.orchestrator.node_service import failed_before_its_kill, merge_ends, nodes_of
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import agents_changed
from zeroserver.states import RUN_MOVES, TRIAL_ENDED, RunState, TrialState, check_move
from zeroserver.store.database import Change
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow
from zeroserver.store.schema import experiments, metric_keys, points, run_nodes, runs, trials

__all__ = ["ExitService", "missing_metric_error"]

_SIGNALS_ABOVE = 128
"""A shell exits with 128 + n if signal n killed its command."""
_MANY_RESTARTS = 3
"""Restart of a trial of which extensions are notified; the last one if fewer are permitted."""
_MANY_PREEMPTIONS = 3
"""Extensions are notified each time that a trial has been preempted so many times."""
_CAUSE_S = 10.0
"""Seconds to wait for other agents to report the cause after one reports only a lost peer."""


class ExitService(Service):
    """Stores how runs ended and decides what happens to their trials."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    runs = Uses(RunService)

    def end_run(
        self,
        run_id: int,
        end: RunExit,
        matches: Sequence[Match] = (),
    ) -> None:
        """End a run and its trial, or requeue or pause the trial; idempotent.

        A run on several agents ends when all of them have reported their outcome.

        Args:
            run_id: The run.
            end: How it ended.
            matches: Matches of the log policies in the tail of its log.

        Raises:
            NotFoundError: If there is no such run.
        """
        run = self.work.find(RunRow, run_id)
        if run.state == RunState.EXITED:
            return
        check_move(RUN_MOVES, f"run {run_id}", run.state, RunState.EXITED)
        secrets = self.work.secrets_of(run.experiment_id)
        end = msgspec.structs.replace(end, reason=_line(mask_values(end.reason or "", secrets)))
        self._note_unread(run, end)
        merged = self._merge_exit(run, end, matches)
        if merged is None:
            return
        end = merged
        now = self.work.clock()
        trial = self.work.trial_of(run)
        reason = self._exit_reason(run, trial, end)
        end = msgspec.structs.replace(end, reason=reason)
        self.work.save(
            runs, run_id, state=RunState.EXITED, ended_at=now,
            exit_code=end.exit_code, reason=end.reason,
        )  # fmt: skip
        self.work.changes += [Change(f"run:{run_id}"), agents_changed()]
        self.work.orchestrator.polling_runs.discard(run_id)
        if trial.run_id != run_id or trial.state in TRIAL_ENDED:
            return
        self.runs.apply_matches(run, matches)
        self.work.save(trials, trial.id, run_id=None, activity=None)
        self._apply_exit(self.work.find(RunRow, run_id), end)

    def _exit_reason(self, run: RunRow, trial: TrialRow, end: RunExit) -> str | None:
        """Return why a run ended, for users; its ranks know only that they were asked to exit."""
        left = end.exit_code == EXIT_PREEMPTED and run.directive != "train"
        killed = bool(run.killed) and end.exit_code < 0 and trial.stop is not None
        cause = None
        if left or (killed and not failed_before_its_kill(self.work.connection, run)):
            cause = exit_cause(trial, self.work.experiment_of(trial).state)
        if cause is None and left and run.grows_to is not None:
            return f"it left for more slots: {run.grows_to} were free for its trial"
        return cause or end.reason

    def _merge_exit(self, run: RunRow, end: RunExit, matches: Sequence[Match]) -> RunExit | None:
        """Store how the ranks of one agent ended; idempotent.

        Args:
            run: The run; it has not ended.
            end: Exit of the agent with node rank ``end.node``.
            matches: Matches of the log policies in the tail of its log.

        Returns:
            Exit of the whole run if all its agents have reported, else None.
        """
        rows = nodes_of(self.work.connection, run.id)
        node = next((row for row in rows if row.node_rank == end.node), None)
        if node is None and (rows or end.node):
            msg = f"run {run.id} has no node {end.node}"
            raise NotFoundError(msg)
        if node is None:
            return end
        if node.ended_at is not None:
            return None
        same_node = (run_nodes.c.run_id == run.id) & (run_nodes.c.node_rank == end.node)
        values = {
            "ended_at": self.work.clock(),
            "exit_code": end.exit_code,
            "reason": end.reason,
            "told": int(end.was_stopped),
        }
        self.work.connection.execute(update(run_nodes).where(same_node).values(**values))
        self.work.changes.append(Change("agents"))
        rows = nodes_of(self.work.connection, run.id)
        if any(row.ended_at is None for row in rows):
            if failed_by_peer(Outcome(end.exit_code, end.reason)) and run.deadline_at is None:
                self.work.save(runs, run.id, deadline_at=self.work.steady() + _CAUSE_S)
            self.runs.apply_matches(run, matches)
            return None
        return merge_ends(rows, end)

    def _note_unread(self, run: RunRow, end: RunExit) -> None:
        """Store which searched hyperparameters no run of the experiment has read."""
        if end.unread_hparams is None or end.exit_code not in (0, EXIT_REACHED):
            return
        experiment = self.work.find(ExperimentRow, run.experiment_id)
        before = experiment.unread_hparams
        if before is None:
            space = msgspec.json.decode(experiment.config).get("hyperparameters")
            names = searched_names(space)
        else:
            names = msgspec.json.decode(before)
        unread = [name for name in names if name in end.unread_hparams]
        if before is None or unread != names:
            text = msgspec.json.encode(unread).decode()
            self.work.save(experiments, experiment.id, unread_hparams=text)

    def _idle_reason(self, run: RunRow, end: RunExit) -> str | None:
        """Return why an interactive task has ended by itself; None for other runs."""
        if end.reason is None:
            return None
        labels = self.work.find(ExperimentRow, run.experiment_id).labels
        return end.reason if PORT_LABEL in msgspec.json.decode(labels) else None

    def _apply_exit(self, run: RunRow, end: RunExit) -> None:
        trial = self.work.trial_of(run)
        code = end.exit_code
        killed_for_delay = (
            bool(run.killed)
            and run.directive != "train"
            and not failed_before_its_kill(self.work.connection, run)
        )
        failed = is_failure(code) and not killed_for_delay
        # Decisions made before the run ended come first: a stopped trial never restarts, whatever
        # its exit code. Deliberate exits follow, then infrastructure failures: they do not count as
        # restarts, because the user's code did not cause them. Any other exit is a failure of the
        # code and counts towards max_restarts.
        if trial.stop == "error":
            self.operations.end_trial(trial, TrialState.ERROR, error=trial.error)
        elif trial.stop == "searcher" and failed:  # even if it reported metrics before
            self._fail_trial(run, trial, end, "the searcher has stopped it")
        elif trial.stop is not None:
            by_searcher = trial.stop == "searcher"
            state = TrialState.COMPLETED if by_searcher else TrialState.CANCELED
            self.operations.end_trial(trial, state)
        elif code == 0:
            error = self._idle_reason(run, end)
            self.operations.end_trial(trial, TrialState.COMPLETED, error=error)
        elif code == EXIT_PREEMPTED or killed_for_delay:
            if code == EXIT_PREEMPTED:  # only these are counted
                self._note_preemption(run, trial)
            self._requeue(trial)
        elif code == EXIT_REACHED:
            self._pause_at_bound(run, trial, end)
        elif code == EXIT_USER_ERROR:
            error = end.reason or "the trial's code or configuration is invalid"
            self.work.log_line(run, f"run {run.id}: {error}; no restart", "ERROR")
            self.operations.end_trial(trial, TrialState.ERROR, error=error)
        elif code == EXIT_INVALID_HP:
            error = end.reason or "the trial declared its hyperparameters invalid"
            self.work.log_line(run, f"run {run.id}: {error}", "WARNING")
            self.operations.end_trial(trial, TrialState.COMPLETED, error=error, reason="invalid_hp")
        elif trial.waits and not failed:
            self._requeue(trial)
        elif code == EXIT_INFRASTRUCTURE and not run.no_retry:
            self._requeue_lost(run, trial, end)
        else:
            self._restart_or_fail(run, trial, end)

    def _note_preemption(self, run: RunRow, trial: TrialRow) -> None:
        """Notify extensions of each third time that a trial loses its slots to other work.

        Pauses by a user or the searcher do not count, nor does a restart with more slots.
        """
        experiment = self.work.experiment_of(trial)
        if run.grows_to is not None or exit_cause(trial, experiment.state) is not None:
            return
        columns = runs.c
        query = select(func.count()).where(
            columns.trial_id == trial.id,
            columns.exit_code == EXIT_PREEMPTED,
            columns.grows_to.is_(None),
            func.coalesce(columns.reason, "").not_like(f"{PAUSED}%"),
        )
        number = int(self.work.connection.execute(query).scalar_one())
        if number and number % _MANY_PREEMPTIONS == 0:
            text = f"run {run.id} was preempted, because other work needs its slots: the trial has "
            text += f"been preempted {number} times, and continues from its last checkpoint"
            self.work.log_line(run, text, "WARNING")
            self.work.emit("preempted", trial.experiment_id, trial.id, text=text)

    def _requeue(self, trial: TrialRow) -> None:
        """Queue a trial without slots again, or pause it if the searcher or a user paused it."""
        experiment = self.work.experiment_of(trial)
        self.lifecycle.move_trial(
            trial, resting_state(experiment.state, waits=trial.waits or trial.held)
        )

    def _pause_at_bound(self, run: RunRow, trial: TrialRow, end: RunExit) -> None:
        """Pause a trial at its rung, or requeue it if the searcher continues it."""
        bound = msgspec.json.decode(run.spec, type=RunSpec).fit
        continued = bound is not None and bound.until is not None and trial.until != bound.until
        if trial.waits or continued:
            if end.reason and BEYOND_BOUND in end.reason:  # shown while it waits
                self.work.save(trials, trial.id, error=end.reason)
            self._requeue(trial)
            return
        metric = self.work.experiment_of(trial).metric
        error = missing_metric_error(trial.until or 0, metric)
        self.work.log_line(run, f"run {run.id}: {error}; no restart", "ERROR")
        self.operations.end_trial(trial, TrialState.ERROR, error=error)

    def _restart_or_fail(self, run: RunRow, trial: TrialRow, end: RunExit) -> None:
        """Restart a failed trial, or end it if it must not or should not restart."""
        config = self.work.config(trial.experiment_id)
        no_restart = None
        if run.no_retry:
            no_restart = "a log policy forbids a restart"
        elif trial.restarts >= config.max_restarts:
            no_restart = f"it has been restarted {trial.restarts} times (max_restarts)"
        elif self._would_fail_again(trial, end.exit_code):
            no_restart = "it failed before its first report, and would fail there again"
        if no_restart is not None:
            self._fail_trial(run, trial, end, no_restart)
            return
        number = trial.restarts + 1
        self.work.save(trials, trial.id, restarts=number)
        wait = self._restart_later(trial, number)
        reason = _reason(end)
        text = f"run {run.id} failed: {reason}; restart {number} of {config.max_restarts} "
        text += "when the searcher resumes the trial" if trial.waits else f"in {wait:g} s"
        self.work.log_line(run, text, "WARNING")
        if number == min(_MANY_RESTARTS, config.max_restarts):
            self.work.emit("restarts", trial.experiment_id, trial.id, text=text)

    def _fail_trial(
        self,
        run: RunRow,
        trial: TrialRow,
        end: RunExit,
        no_restart: str,
    ) -> None:
        """End a trial with the error of its last run; ``no_restart`` is the reason."""
        reason = _reason(end)
        text = f"run {run.id} failed: {reason}; no restart: {no_restart}"
        self.work.log_line(run, text, "ERROR")
        self.operations.end_trial(trial, TrialState.ERROR, error=reason)

    def _would_fail_again(self, trial: TrialRow, exit_code: int) -> bool:
        """Check whether a restart would be useless: the code failed before its first report.

        A signal, or a failure after a restart, may have an external cause. A command that does not
        have to report, such as a task, restarts if its configuration sets ``max_restarts``.
        """
        by_signal = exit_code < 0 or exit_code > _SIGNALS_ABOVE
        if by_signal or trial.restarts or trial.latest_checkpoint is not None:
            return False
        experiment = self.work.experiment_of(trial)
        if not experiment.metric and "max_restarts" in msgspec.json.decode(experiment.raw_config):
            return False
        reported = (
            select(points.c.step)
            .join(metric_keys, metric_keys.c.id == points.c.key_id)
            .where(points.c.trial_id == trial.id, metric_keys.c.group_name != "system")
            .limit(1)
        )
        return self.work.connection.scalar(reported) is None

    def _requeue_lost(self, run: RunRow, trial: TrialRow, end: RunExit) -> None:
        """Requeue a trial after an infrastructure failure, without counting a restart."""
        lost = self._lost_in_a_row(trial.id)
        wait = self._restart_later(trial, lost)
        reason = end.reason or "its machine or its storage failed"
        text = f"run {run.id} was lost: {reason}; it starts again in {wait:g} s, not counted"
        self.work.log_line(run, text, "WARNING")
        if lost == _MANY_RESTARTS:
            self.work.emit("restarts", trial.experiment_id, trial.id, text=text)

    def _lost_in_a_row(self, trial_id: int) -> int:
        """Return the number of consecutive lost runs at the end of a trial's history."""
        last_other = (
            select(func.max(runs.c.id))
            .where(runs.c.trial_id == trial_id, runs.c.exit_code != EXIT_INFRASTRUCTURE)
            .correlate(None)
            .scalar_subquery()
        )
        query = select(func.count()).where(
            runs.c.trial_id == trial_id, runs.c.id > func.coalesce(last_other, 0)
        )
        return int(self.work.connection.execute(query).scalar_one())

    def _restart_later(self, trial: TrialRow, number: int) -> float:
        """Queue a trial after a delay that doubles with ``number``; return the delay in seconds."""
        timings = self.work.settings.timings
        wait = min(timings.backoff_first_s * 2.0 ** min(number - 1, 32), timings.backoff_most_s)
        self.work.save(trials, trial.id, restart_at=self.work.steady() + wait)
        self._requeue(trial)
        return wait


def _line(text: str | None) -> str | None:
    """Convert a reason to a single line of at most 2,000 characters."""
    line = " ".join((text or "").replace("\0", "").split())
    return line[:2000] or None


def missing_metric_error(length: float, metric: str) -> str:
    """Return the error of a trial that did not report the searcher's metric."""
    return (
        f"searcher.metric: must be reported by a validation at length {length:g}, because the "
        f"searcher compares trials there, got no {metric!r}"
    )


def _reason(end: RunExit) -> str:
    return end.reason or f"exit code {end.exit_code}"
