"""Runs: start, progress and end, and the consequences for their trials."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import func, select

from zerolab.contract.hparam_reads import searched_names
from zerolab.contract.messages import RunExit
from zerolab.contract.names import printable
from zerolab.contract.outcome import BEYOND_BOUND, is_failure
from zerolab.contract.secret_text import mask_values
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_USER_ERROR,
    CheckpointRef,
    Command,
    FitSpec,
    RunSpec,
)
from zerolab.errors import StaleRunError
from zeroserver.orchestrator.log_policies import Match
from zeroserver.orchestrator.node_service import failed_before_its_kill
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import agents_changed, owner_of, resolved_config
from zeroserver.orchestrator.trial_service import resting_state
from zeroserver.states import (
    RUN_MOVES,
    TRIAL_ENDED,
    RunState,
    TrialState,
    check_move,
)
from zeroserver.store.database import Change
from zeroserver.store.points import forget_after
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow
from zeroserver.store.schema import (
    agents,
    checkpoints,
    experiments,
    metric_keys,
    points,
    runs,
    trials,
)

__all__ = ["Reporting", "RunService", "no_metric_at", "shown_activity"]

_ASKS_AGAIN_S = 60.0
"""For runs that have asked the server before it was started anew to ask again."""
_SIGNALS_ABOVE = 128
"""A shell exits with 128 + n when signal n has killed its command."""


class Reporting(msgspec.Struct, frozen=True, gc=False):
    """Run that may report, with the progress of its trial."""

    id: int
    trial_id: int
    experiment_id: int
    last_seq: int
    steps_completed: int


class RunService(Service):
    """Assigns runs to slots and decides what follows from their end."""

    def direct(self, run_id: int, directive: str) -> None:
        """Ask a run to checkpoint and exit; the experiment's preemption timeout starts to run."""
        run = self.work.find(RunRow, run_id)
        if run.directive in {"stop", directive}:
            return
        timeout = self.work.config(run.experiment_id).preemption_timeout
        deadline = run.deadline_at
        if deadline is None and timeout is not None:
            deadline = self.work.steady() + timeout
        self.work.save(runs, run_id, directive=directive, deadline_at=deadline)
        self.work.changes.append(Change(f"run:{run_id}"))
        if directive == "preempt" and self.never_asks(run):
            end = (
                ""
                if timeout is None
                else f" until it is killed, in {timeout} s (preemption_timeout)"
            )
            text = (
                f"run {run_id} shall save and leave, but its command does not ask whether to: "
                f"it runs on{end}; `zerolab.core` asks"
            )
            self.work.log_line(run, text, "WARNING")

    def never_asks(self, run: RunRow) -> bool:
        """Return whether a run is a command that never asks whether to stop."""
        up_s = time.monotonic() - self.work.orchestrator.agents.started
        if run.id in self.work.orchestrator.polling_runs or (
            up_s < _ASKS_AGAIN_S and self.work.clock() - run.created_at > up_s
        ):
            return False
        return isinstance(msgspec.json.decode(run.spec, type=RunSpec).entrypoint, Command)

    def kill(self, run_id: int) -> None:
        """Let the agent kill a run's processes now."""
        run = self.work.find(RunRow, run_id)
        if not run.killed:
            self.work.save(runs, run_id, killed=1, killed_at=self.work.clock())
        self.work.changes.append(agents_changed())

    def current(self, run_id: int) -> tuple[RunRow, TrialRow]:
        """Return a run and its trial if it is the trial's current run.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
        """
        run = self.work.find(RunRow, run_id)
        trial = self.work.trial_of(run)
        if run.state == RunState.EXITED or trial.run_id != run_id:
            msg = f"run {run_id} of trial {trial.id} has ended here, or another run has taken over"
            raise StaleRunError(msg)
        return run, trial

    def assign(self, trial: TrialRow, slots: Mapping[int, Sequence[int]]) -> int | None:
        """Create a run of a trial on slots of one or several agents; return its id.

        Points after the checkpoint that it starts from are forgotten, for it reports them again. Of
        a long trial one change forgets a part of them, and returns None: ask again in another
        change.
        """
        experiment = self.work.experiment_of(trial)
        checkpoint = self._latest_checkpoint(trial)
        if checkpoint is not None:
            saved_on = self._other_agent(checkpoint.uuid, slots)
            checkpoint = msgspec.structs.replace(checkpoint, saved_on=saved_on)
        steps = checkpoint.steps_completed if checkpoint else 0
        resumes = checkpoint is not None and not checkpoint.warm_start
        after = steps if resumes else -1
        forgotten = forget_after(
            self.work, trial.id, after, self.work.orchestrator.queue.point_budget
        )
        if forgotten is None:
            self.work.orchestrator.queue.point_budget = 0
            return None
        self.work.orchestrator.queue.point_budget -= forgotten
        storage = self.work.storage_of(experiment.id)
        (agent_id, slot_ids), *other_nodes = slots.items()
        unit = experiment.slots_per_rank
        now = self.work.clock()
        row: dict[str, Any] = {
            "trial_id": trial.id,
            "experiment_id": experiment.id,
            "agent_id": agent_id,
            "slot_ids": msgspec.json.encode(slot_ids).decode(),
            "state": RunState.ASSIGNED,
            "spec": "",
            "created_at": now,
        }
        from zerolab.config.experiment.run_spec import (
            run_spec_fields,  # pydantic, not before it is needed
        )

        result = self.work.connection.execute(runs.insert().values(row).returning(runs.c.id))
        run_id = int(result.scalar_one())
        sections = run_spec_fields(self.work.config(experiment.id))
        sections["fit"] = msgspec.structs.replace(
            sections["fit"], until=_bound(sections["fit"], trial)
        )
        on_hosts = sum(len(slot_id.slots) for slot_id in sections["hosts"])
        spec = RunSpec(
            experiment_id=experiment.id,
            trial_id=trial.id,
            run_id=run_id,
            **sections,
            config=mask_secrets(resolved_config(experiment), for_trial=True),
            hparams=msgspec.json.decode(trial.hparams),
            trial_seed=trial.seed,
            slots=on_hosts or sum(map(len, slots.values())) // unit,
            planned_slots=on_hosts or experiment.slots // unit,
            slots_per_rank=unit,
            nodes=self.work.nodes.spread(run_id, slots, unit) if other_nodes else None,
            model_dir="",
            run_dir="",
            checkpoint_dir=storage.root,
            storage_options=storage.options,
            storage_owner=owner_of(self.work.orchestrator, trial.id),
            latest_checkpoint=checkpoint,
            restarts=trial.restarts,
            test_mode=bool(experiment.test_mode),
        )
        self.work.save(runs, run_id, spec=msgspec.json.encode(spec).decode())
        self.work.save(
            trials, trial.id, run_id=run_id, restart_at=None, activity=None,
            steps_completed=steps, error=None,
            started_at=trial.started_at or now,
        )  # fmt: skip
        self.work.touch("trial", experiment.id, trial.id)
        if experiment.started_at is None or experiment.waits_since is not None:
            started_at = experiment.started_at or now
            self.work.save(
                experiments, experiment.id, started_at=started_at, waits_since=None
            )  # a run may be over before the clock ticks again
        self.work.changes.append(agents_changed())
        return run_id

    def started(self, run_id: int, now: float) -> None:
        """Mark a run as running; repeating it changes nothing.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
        """
        run, trial = self.current(run_id)
        if run.state == RunState.RUNNING:
            return
        self.work.save(runs, run_id, state=RunState.RUNNING, started_at=now)
        if trial.state == TrialState.QUEUED:
            self.work.trials.move(trial, TrialState.RUNNING)
            self.work.save(trials, trial.id, activity=None)  # a step of its start is over

    def show_activity(self, run_id: int, text: str) -> None:
        """Store the current activity of a run.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
        """
        _, trial = self.current(run_id)
        self.work.save(trials, trial.id, activity=shown_activity(text))
        self.work.touch("trial", trial.experiment_id, trial.id)

    def exited(
        self,
        run_id: int,
        end: RunExit,
        matches: Sequence[Match] = (),
    ) -> None:
        """End a run and decide what its trial does next; repeating it changes nothing.

        A run on several agents ends when all of them have reported their outcome.

        Args:
            run_id: The run.
            end: How it ended.
            matches: What the log policies found in the tail of its log.

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
        merged = self.work.nodes.merge_exit(run, end, matches)
        if merged is None:
            return
        end = merged
        now = self.work.clock()
        reason = end.reason
        if run.grows_to is not None and end.exit_code == EXIT_PREEMPTED:
            reason = f"it left for more slots: {run.grows_to} were free for its trial"
        end = msgspec.structs.replace(end, reason=reason)
        self.work.save(
            runs, run_id, state=RunState.EXITED, ended_at=now,
            exit_code=end.exit_code, reason=end.reason,
        )  # fmt: skip
        self.work.changes += [Change(f"run:{run_id}"), agents_changed()]
        self.work.orchestrator.polling_runs.discard(run_id)
        trial = self.work.trial_of(run)
        if trial.run_id != run_id or trial.state in TRIAL_ENDED:
            return
        self.apply_matches(run, matches)
        self.work.save(trials, trial.id, run_id=None, activity=None)
        self._apply_exit(self.work.find(RunRow, run_id), end)

    def _note_unread(self, run: RunRow, end: RunExit) -> None:
        """Store the searched hyperparameters that no run of the experiment has read."""
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

    def _apply_exit(self, run: RunRow, end: RunExit) -> None:
        trial = self.work.trial_of(run)
        code = end.exit_code
        forced = (  # it was too slow to leave
            bool(run.killed)
            and run.directive != "train"
            and not failed_before_its_kill(self.work.connection, run)
        )
        failed = is_failure(code) and not forced
        if trial.stop == "error":
            self.work.trials.end(trial, TrialState.ERROR, error=trial.error)
        elif trial.stop == "searcher" and failed:  # whatever it has reported before
            self._fail_trial(run, trial, end, "the searcher needs no more of it")
        elif trial.stop is not None:
            by_searcher = trial.stop == "searcher"
            state = TrialState.COMPLETED if by_searcher else TrialState.CANCELED
            self.work.trials.end(trial, state)
        elif code == 0:
            self.work.trials.end(trial, TrialState.COMPLETED)
        elif code == EXIT_PREEMPTED or forced:
            self._requeue(trial)
        elif code == EXIT_REACHED:
            self._pause_at_bound(run, trial, end)
        elif code == EXIT_USER_ERROR:
            error = end.reason or "the trial cannot work as it is written or configured"
            self.work.log_line(run, f"run {run.id}: {error}; no restart", "ERROR")
            self.work.trials.end(trial, TrialState.ERROR, error=error)
        elif code == EXIT_INVALID_HP:
            error = end.reason or "the trial declared its hyperparameters invalid"
            self.work.log_line(run, f"run {run.id}: {error}", "WARNING")
            self.work.trials.end(trial, TrialState.COMPLETED, error=error, reason="invalid_hp")
        elif trial.waits and not failed:
            self._requeue(trial)
        elif code == EXIT_INFRASTRUCTURE and not run.no_retry:
            self._requeue_lost(run, trial, end)
        else:
            self._failed(run, trial, end)

    def _requeue(self, trial: TrialRow) -> None:
        """Queue a trial that gave its slots back, unless something has it wait."""
        experiment = self.work.experiment_of(trial)
        self.work.trials.move(
            trial, resting_state(experiment.state, waits=trial.waits or trial.held)
        )

    def _pause_at_bound(self, run: RunRow, trial: TrialRow, end: RunExit) -> None:
        """Pause a trial at its rung, or queue it if the searcher continues it."""
        bound = msgspec.json.decode(run.spec, type=RunSpec).fit
        continued = bound is not None and bound.until is not None and trial.until != bound.until
        if trial.waits or continued:
            if end.reason and BEYOND_BOUND in end.reason:  # shown while it waits
                self.work.save(trials, trial.id, error=end.reason)
            self._requeue(trial)
            return
        metric = self.work.experiment_of(trial).metric
        error = no_metric_at(trial.until or 0, metric)
        self.work.log_line(run, f"run {run.id}: {error}; no restart", "ERROR")
        self.work.trials.end(trial, TrialState.ERROR, error=error)

    def _failed(self, run: RunRow, trial: TrialRow, end: RunExit) -> None:
        """Start a failed trial again, or end it where that is of no use."""
        config = self.work.config(trial.experiment_id)
        why = None
        if run.no_retry:
            why = "a log policy forbids a restart"
        elif trial.restarts >= config.max_restarts:
            why = f"it has been restarted {trial.restarts} times (max_restarts)"
        elif self._would_fail_again(trial, end.exit_code):
            why = "it failed before its first report, and would fail there again"
        if why is not None:
            self._fail_trial(run, trial, end, why)
            return
        number = trial.restarts + 1
        self.work.save(trials, trial.id, restarts=number)
        wait = self._restart_later(trial, number)
        reason = _reason(end)
        text = f"run {run.id} failed: {reason}; restart {number} of {config.max_restarts} "
        text += "when the searcher resumes the trial" if trial.waits else f"in {wait:g} s"
        self.work.log_line(run, text, "WARNING")

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
        self.work.trials.end(trial, TrialState.ERROR, error=reason)

    def _would_fail_again(self, trial: TrialRow, exit_code: int) -> bool:
        """Return whether a restart is of no use: the code failed before it reported anything.

        A death by a signal may have a cause outside. So may the failure of a trial that was
        restarted before. A command that need not report, such as a task, is restarted if its file
        sets ``max_restarts``.
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
        wait = self._restart_later(trial, self._lost_in_a_row(trial.id))
        reason = end.reason or "its machine or its storage failed"
        text = f"run {run.id} was lost: {reason}; it starts again in {wait:g} s, not counted"
        self.work.log_line(run, text, "WARNING")

    def _lost_in_a_row(self, trial_id: int) -> int:
        """How many of a trial's runs were lost one after another, the last one included."""
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
        """Queue a trial, not to start before a pause that doubles with ``number``; return it."""
        timings = self.work.settings.timings
        wait = min(timings.backoff_first_s * 2.0 ** min(number - 1, 32), timings.backoff_most_s)
        self.work.save(trials, trial.id, restart_at=self.work.steady() + wait)
        self._requeue(trial)
        return wait

    def _latest_checkpoint(self, trial: TrialRow) -> CheckpointRef | None:
        if trial.latest_checkpoint is None:
            source = self.work.warm_starts.reference(trial)
            return source and self._with_options(source)
        query = select(checkpoints.c.uuid, checkpoints.c.steps_completed).where(
            checkpoints.c.uuid == trial.latest_checkpoint
        )
        row = self.work.connection.execute(query).one()
        return CheckpointRef(row.uuid, row.steps_completed)

    def _other_agent(self, uuid: str, slots: Mapping[int, Sequence[int]]) -> str:
        """Name the agent that saved a checkpoint, unless it is the only one of a new run."""
        query = (
            select(runs.c.agent_id, agents.c.name, agents.c.host)
            .join(checkpoints, checkpoints.c.run_id == runs.c.id)
            .outerjoin(agents, agents.c.id == runs.c.agent_id)
            .where(checkpoints.c.uuid == uuid)
        )
        row = self.work.connection.execute(query).one_or_none()
        if row is None or set(slots) == {row.agent_id}:
            return ""
        return "an agent that was removed" if row.name is None else f"agent {row.name} ({row.host})"

    def _with_options(self, reference: CheckpointRef) -> CheckpointRef:
        """Add the storage options of the experiment that owns a checkpoint."""
        query = select(checkpoints.c.experiment_id).where(checkpoints.c.uuid == reference.uuid)
        experiment_id = self.work.connection.execute(query).scalar_one()
        options = self.work.storage_of(experiment_id).options
        return msgspec.structs.replace(reference, options=options)

    def reporting(self, run_id: int) -> Reporting:
        """Return a run that may report.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If the run has ended, or another run has taken over.
        """
        rows = self.work.raw(
            "SELECT r.trial_id, r.experiment_id, r.last_seq, t.steps_completed FROM runs r "
            "JOIN trials t ON t.id = r.trial_id AND t.run_id = r.id "
            "WHERE r.id = ? AND r.state <> ?",
            (run_id, str(RunState.EXITED)),
        )
        if not rows:
            self.current(run_id)  # says why
        trial_id, experiment_id, last_seq, steps = rows[0]
        return Reporting(
            id=run_id,
            trial_id=trial_id,
            experiment_id=experiment_id,
            last_seq=last_seq,
            steps_completed=steps,
        )

    def apply_matches(self, run: RunRow, matches: Sequence[Match]) -> None:
        """Label the run's trial and apply the actions of log policies."""
        if not matches:
            return
        if any(match.action == "cancel_retries" for match in matches):
            self.work.save(runs, run.id, no_retry=1)
        trial = self.work.trial_of(run)
        if any(match.action == "exclude_node" for match in matches):
            agents = {*msgspec.json.decode(trial.excluded), run.agent_id}
            self.work.save(trials, trial.id, excluded=msgspec.json.encode(agents).decode())
        labels_before: list[str] = msgspec.json.decode(trial.labels)
        labels = list(dict.fromkeys([*labels_before, *(match.label for match in matches)]))
        if labels != labels_before:
            self.work.save(trials, trial.id, labels=msgspec.json.encode(labels).decode())
            self.work.touch("trial", trial.experiment_id, trial.id)


def _bound(fit: FitSpec, trial: TrialRow) -> int | None:
    """Where the run pauses: at what the searcher said, unless that is the end of the trial."""
    max_length = fit.max_length.count if fit.max_length is not None else None
    until: int | None = trial.until
    return until if until is not None and max_length is not None and until < max_length else None


def shown_activity(text: str) -> str:
    """What is kept of what a run says it does."""
    return printable(text[:100])


def _line(text: str | None) -> str | None:
    """Make one line of a reason, short enough to show."""
    return " ".join(text.replace("\0", "").split())[:2000] or None if text else None


def no_metric_at(length: float, metric: str) -> str:
    """Warn that a trial has not reported the searcher's metric."""
    return (
        f"searcher.metric: must be reported by a validation at length {length:g}, where the "
        f"searcher compares trials, got no {metric!r} there"
    )


def _reason(end: RunExit) -> str:
    return end.reason or f"exit code {end.exit_code}"
