"""Runs: creation, start, directives, and effects of log policies."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from zerolab.contract.names import printable
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import (
    CheckpointRef,
    Command,
    FitSpec,
    RunSpec,
)
from zerolab.errors import StaleRunError
from zeroserver.orchestrator.ingest.media_service import MediaService
from zeroserver.orchestrator.lifecycle import LifecycleService
from zeroserver.orchestrator.log_policies import Match
from zeroserver.orchestrator.node_service import NodeService
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import agents_changed, owner_of, resolved_config
from zeroserver.states import (
    RunState,
    TrialState,
)
from zeroserver.store.database import Change
from zeroserver.store.points import forget_after
from zeroserver.store.rows import Reporting, RunRow, TrialRow
from zeroserver.store.schema import (
    agents,
    checkpoints,
    experiments,
    runs,
    trials,
)

__all__ = ["RunService", "shown_activity"]

_POLLS_AGAIN_S = 60.0
"""Time after a restart of the server within which running commands may poll again."""


class RunService(Service):
    """Creates runs on slots and directs them."""

    lifecycle = Uses(LifecycleService)
    media = Uses(MediaService)
    nodes = Uses(NodeService)
    warm_starts = Uses(WarmStartService)

    def direct(self, run_id: int, directive: str) -> None:
        """Ask a run to checkpoint and exit, and start its preemption timeout."""
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
            limit = (
                ""
                if timeout is None
                else f" until it is killed, in {timeout} s (preemption_timeout)"
            )
            text = (
                f"run {run_id} was asked to save and exit, but its command does not poll for it: "
                f"it continues{limit}; poll with context.preempt.should_preempt()"
            )
            self.work.log_line(run, text, "WARNING")

    def never_asks(self, run: RunRow) -> bool:
        """Check whether a run is a command that has never polled whether to stop."""
        up_s = time.monotonic() - self.work.orchestrator.agents.started
        if run.id in self.work.orchestrator.polling_runs or (
            up_s < _POLLS_AGAIN_S and self.work.clock() - run.created_at > up_s
        ):
            return False
        return isinstance(msgspec.json.decode(run.spec, type=RunSpec).entrypoint, Command)

    def kill(self, run_id: int) -> None:
        """Make the agent kill a run's processes now."""
        run = self.work.find(RunRow, run_id)
        if not run.killed:
            self.work.save(runs, run_id, killed=1, killed_at=self.work.clock())
        self.work.changes.append(agents_changed())

    def current(self, run_id: int) -> tuple[RunRow, TrialRow]:
        """Return a run and its trial if it is the trial's current run.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has replaced it.
        """
        run = self.work.find(RunRow, run_id)
        trial = self.work.trial_of(run)
        if run.state == RunState.EXITED or trial.run_id != run_id:
            msg = f"run {run_id} of trial {trial.id} has ended here, or another run has taken over"
            raise StaleRunError(msg)
        return run, trial

    def assign(self, trial: TrialRow, slots: Mapping[int, Sequence[int]]) -> int | None:
        """Create a run of a trial on slots of one or several agents; return its id.

        Deletes the points and media after the checkpoint from which it resumes, since it reports
        them again. If there are too many for one transaction, returns None: call it again in
        another one.
        """
        experiment = self.work.experiment_of(trial)
        checkpoint = self._latest_checkpoint(trial)
        if checkpoint is not None:
            saved_on = self._other_agent(checkpoint.uuid, slots)
            checkpoint = msgspec.structs.replace(checkpoint, saved_on=saved_on)
        steps = checkpoint.steps_completed if checkpoint else 0
        resumes = checkpoint is not None and not checkpoint.warm_start
        last_kept_step = steps if resumes else -1
        forgotten = forget_after(
            self.work, trial.id, last_kept_step, self.work.orchestrator.queue.point_budget
        )
        if forgotten is None:
            self.work.orchestrator.queue.point_budget = 0
            return None
        self.work.orchestrator.queue.point_budget -= forgotten
        self.media.forget_after(trial.id, last_kept_step)
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
            run_spec_fields,  # imports pydantic
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
            nodes=self.nodes.spread(run_id, slots, unit) if other_nodes else None,
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
            )  # a run may end before the next tick
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
            self.lifecycle.move_trial(trial, TrialState.RUNNING)
            self.work.save(trials, trial.id, activity=None)  # clear the activity of its startup

    def show_activity(self, run_id: int, text: str) -> None:
        """Store the current activity of a run.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
        """
        _, trial = self.current(run_id)
        self.work.save(trials, trial.id, activity=shown_activity(text))
        self.work.touch("trial", trial.experiment_id, trial.id)

    def _latest_checkpoint(self, trial: TrialRow) -> CheckpointRef | None:
        if trial.latest_checkpoint is None:
            source = self.warm_starts.reference(trial)
            return source and self._with_options(source)
        query = select(checkpoints.c.uuid, checkpoints.c.steps_completed).where(
            checkpoints.c.uuid == trial.latest_checkpoint
        )
        row = self.work.connection.execute(query).one()
        return CheckpointRef(row.uuid, row.steps_completed)

    def _other_agent(self, uuid: str, slots: Mapping[int, Sequence[int]]) -> str:
        """Describe the agent that saved a checkpoint; empty if the new run uses only that one."""
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
        """Return a run that may report, with few columns for speed.

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
            self.current(run_id)  # raises the error
        trial_id, experiment_id, last_seq, steps = rows[0]
        return Reporting(
            id=run_id,
            trial_id=trial_id,
            experiment_id=experiment_id,
            last_seq=last_seq,
            steps_completed=steps,
        )

    def apply_matches(self, run: RunRow, matches: Sequence[Match]) -> None:
        """Label the run's trial and apply the actions of matching log policies."""
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
            for match in matches:
                if match.label not in labels_before:
                    text = f"{match.label}: {match.line}"
                    self.work.emit("log_pattern", trial.experiment_id, trial.id, text=text)


def _bound(fit: FitSpec, trial: TrialRow) -> int | None:
    """Return where a run pauses for the searcher; None if not before the end of the trial."""
    max_length = fit.max_length.count if fit.max_length is not None else None
    until: int | None = trial.until
    return until if until is not None and max_length is not None and until < max_length else None


def shown_activity(text: str) -> str:
    """Return a reported activity as stored: printable, at most 100 characters."""
    return printable(text[:100])
