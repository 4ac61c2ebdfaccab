"""Warm starts: trials that start from another trial's checkpoint, and the wait for it.

The source is a trial named by the searcher (``Create.source``), or a trial or checkpoint named by
the user (``source_trial_id``, ``source_checkpoint_uuid`` of ``searcher``). The checkpoint is chosen
once and stored with the trial, so that restarts of the trial or the server do not change it:

- for the user's trial: its newest checkpoint at submission;
- for the searcher's trial: the checkpoint of the newest validation that the searcher had received,
  or the first one after it. Until it exists, the new trial waits. If it can no longer be created,
  the newest checkpoint is used.
"""

from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Select, select, text, update

from zerolab.contract.spec import CheckpointRef
from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Create
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import EXPERIMENT_ENDED, TRIAL_ENDED, TrialState
from zeroserver.store.rows import CheckpointRow, TrialRow, read_row
from zeroserver.store.schema import WEIGHTS_MISSING, checkpoints, experiments, trials
from zeroserver.store.short_uuids import full_uuid

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.searcher.section import SearcherConfig

__all__ = ["NO_WEIGHTS", "WarmStartService", "complete_checkpoint", "needed_for_warm_start"]

_MAX_WAITING = 1000
_ANY_MISSING = f"SELECT 1 FROM trials WHERE {WEIGHTS_MISSING} LIMIT 1"  # noqa: S608 - our own words
NO_WEIGHTS = ""
"""Value of ``trials.source_checkpoint`` if the source has no checkpoint and will get none."""


class WarmStartService(Service):
    """Chooses and protects the checkpoints from which trials start."""

    searches = Uses(SearchService)

    def source_of_experiment(self, searcher: "SearcherConfig") -> str | None:
        """Return the checkpoint from which the trials of a new experiment start, if any.

        Raises:
            ConfigError: If it does not exist.
        """
        uuid, trial_id = searcher.source_checkpoint_uuid, searcher.source_trial_id
        if uuid is not None:
            uuid = full_uuid(self.work.connection, uuid)
            of_checkpoint = select(checkpoints.c.experiment_id).where(checkpoints.c.uuid == uuid)
            missing = complete_checkpoint(self.work.connection, uuid) is None
            if missing or self._is_hidden(of_checkpoint):
                problem = (
                    f"must be a complete checkpoint, got {uuid}; `zerolab checkpoint "
                    "list` lists them"
                )
                raise ConfigError("experiment", [f"searcher.source_checkpoint_uuid: {problem}"])
            return uuid
        if trial_id is None:
            return None
        checkpoint = self.newest_checkpoint(trial_id)
        of_trial = select(trials.c.experiment_id).where(trials.c.id == trial_id)
        is_hidden = self._is_hidden(of_trial)
        if checkpoint is None or is_hidden:
            missing = is_hidden or self.work.connection.scalar(of_trial) is None
            problem = "does not exist" if missing else "has no checkpoint"
            line = f"must be a trial with a checkpoint, got {trial_id}, which {problem}"
            raise ConfigError("experiment", [f"searcher.source_trial_id: {line}"])
        return checkpoint

    def _is_hidden(self, experiment_id: Select[tuple[int]]) -> bool:
        """Check whether the caller of the request must not see an experiment."""
        if not self.work.hidden:
            return False
        query = select(experiments.c.project_id).where(experiments.c.id.in_(experiment_id))
        return self.work.connection.scalar(query) in self.work.hidden

    def source_of_trial(self, experiment_id: int, operation: Create) -> dict[str, Any]:
        """Return the columns of a new trial that select its initial weights.

        A source that a user has deleted counts as a source without a checkpoint.

        Raises:
            ConfigError: If the searcher names a trial that was never created.
        """
        if operation.source is None:
            return {}
        query = select(trials).where(
            trials.c.experiment_id == experiment_id, trials.c.request_id == operation.source
        )
        source = read_row(self.work.connection, TrialRow, query)
        if source is None and operation.source in self.searches.created_trials(experiment_id):
            return {"source_checkpoint": NO_WEIGHTS}
        if source is None:
            problem = f"must be the number of a trial that was created, got {operation.source}"
            raise ConfigError("searcher", [f"source of trial {operation.trial_id}: {problem}"])
        steps = max(source.searcher_steps, 0)
        chosen = self._choose(source, steps)
        return {
            "source_trial_id": source.id,
            "source_steps": steps,
            "source_checkpoint": chosen,
        }

    def settle_sources(self, source_trial_id: int) -> bool:
        """Choose the checkpoint for trials that wait for one of this trial, if possible.

        Returns:
            Whether a checkpoint was chosen for one of them.
        """
        settled = False
        waiting = select(trials.c.id, trials.c.experiment_id, trials.c.source_steps).where(
            trials.c.source_trial_id == source_trial_id, trials.c.source_checkpoint.is_(None)
        )
        waiting_trials = self.work.connection.execute(waiting.order_by(trials.c.id)).all()
        if not waiting_trials:
            return False
        source = self.work.find(TrialRow, source_trial_id)
        choices = {
            steps: self._choose(source, steps) for steps in {row[2] for row in waiting_trials}
        }
        rows = []
        for trial_id, experiment_id, steps in waiting_trials:
            chosen = choices[steps]
            if chosen is not None:
                rows.append((chosen, trial_id))
                self.work.touch("trial", experiment_id, trial_id)
                settled = True
        self.work.many("UPDATE trials SET source_checkpoint = ? WHERE id = ?", rows)
        return settled

    def _choose(self, source: TrialRow, steps: int) -> str | None:
        """Return a checkpoint's uuid, :data:`NO_WEIGHTS`, or None if one may still be created."""
        columns = checkpoints.c
        first_at_steps = (
            select(columns.uuid)
            .where(
                columns.trial_id == source.id,
                columns.state == "COMPLETED",
                columns.steps_completed >= steps,
            )
            .order_by(columns.steps_completed, columns.id.desc())
            .limit(1)
        )
        uuid: str | None = self.work.connection.scalar(first_at_steps)
        if uuid is not None:
            return uuid
        waits = source.state == TrialState.PAUSED and source.waits and source.run_id is None
        if source.state not in TRIAL_ENDED and not waits:
            return None
        return self.newest_checkpoint(source.id) or NO_WEIGHTS

    def newest_checkpoint(self, trial_id: int) -> str | None:
        """Return the uuid of a trial's complete checkpoint with the most steps."""
        columns = checkpoints.c
        query = (
            select(columns.uuid)
            .where(columns.trial_id == trial_id, columns.state == "COMPLETED")
            .order_by(columns.steps_completed.desc(), columns.id.desc())
            .limit(1)
        )
        uuid: str | None = self.work.connection.scalar(query)
        return uuid

    def source_problem(self, trial: TrialRow) -> str | None:
        """Return why a trial cannot load its initial weights; None if it can."""
        uuid = trial.source_checkpoint
        if trial.latest_checkpoint is not None or uuid is None:
            return None
        if uuid == NO_WEIGHTS and trial.source_trial_id is None:
            return "the trial whose weights it starts with has been deleted"
        if uuid == NO_WEIGHTS:
            return f"trial {trial.source_trial_id}, whose weights it starts with, has no checkpoint"
        return self.checkpoint_problem(uuid)

    def checkpoint_problem(self, uuid: str) -> str | None:
        """Return why trials cannot start from a checkpoint; None if they can."""
        if complete_checkpoint(self.work.connection, uuid) is None:
            return f"checkpoint {uuid}, whose weights it starts with, has been deleted"
        return None

    def reference(self, trial: TrialRow) -> CheckpointRef | None:
        """Return the checkpoint from which a trial warm-starts, if any."""
        uuid = trial.source_checkpoint
        if not uuid:
            return None
        row = complete_checkpoint(self.work.connection, uuid)
        assert row is not None, "source_problem checks it"
        root = self.work.storage_of(row.experiment_id).root  # the home may have moved
        return CheckpointRef(uuid, 0, root=root, warm_start=True)

    def waiting_for_weights(self) -> dict[int, tuple[int, str]]:
        """Return the trials that wait for a checkpoint, with their experiment and the reason."""
        if not self.work.raw(_ANY_MISSING):
            return {}
        query = (
            select(trials.c.id, trials.c.experiment_id, trials.c.source_trial_id)
            .where(trials.c.state == TrialState.QUEUED, text(WEIGHTS_MISSING))
            .order_by(trials.c.id)
            .limit(_MAX_WAITING)
        )
        return {
            row.id: (
                row.experiment_id,
                f"it starts with the weights of trial {row.source_trial_id}, and waits for a "
                "checkpoint of it",
            )
            for row in self.work.connection.execute(query)
        }

    def forget_source(self, trial_id: int) -> None:
        """Stop trials from waiting for a checkpoint of a deleted trial."""
        waiting = update(trials).where(
            trials.c.source_trial_id == trial_id, trials.c.source_checkpoint.is_(None)
        )
        self.work.connection.execute(waiting.values(source_checkpoint=NO_WEIGHTS))

    def refuse_while_needed(self, thing: str, whose: ColumnElement[bool]) -> None:
        """Refuse to delete an experiment or trial whose checkpoints other trials start from.

        Args:
            thing: Experiment or trial to delete, as in "trial 3".
            whose: Condition on the checkpoints that would be deleted with it.

        Raises:
            ConflictError: If one of them is needed; the error names the experiment.
        """
        candidates = select(checkpoints.c.uuid).where(whose)
        columns = trials.c
        by_trial = select(columns.experiment_id).where(
            columns.source_checkpoint.in_(candidates), columns.state.not_in(TRIAL_ENDED)
        )
        by_experiment = select(experiments.c.id).where(
            experiments.c.source_checkpoint.in_(candidates),
            experiments.c.state.not_in(EXPERIMENT_ENDED),
        )
        experiment_id = self.work.connection.scalar(by_trial.union(by_experiment).limit(1))
        if experiment_id is not None:
            msg = (
                f"{thing}: has a checkpoint whose weights are needed by experiment "
                f"{experiment_id}; "
                "delete it when that experiment has ended, or kill that experiment first"
            )
            raise ConflictError(msg)


def complete_checkpoint(connection: Connection, uuid: str) -> CheckpointRow | None:
    """Return a checkpoint if it is complete and not deleted."""
    query = select(checkpoints).where(
        checkpoints.c.uuid == uuid, checkpoints.c.state == "COMPLETED"
    )
    return read_row(connection, CheckpointRow, query)


def needed_for_warm_start() -> Select[tuple[str]]:
    """Select the checkpoints that trials may still start from; they must not be deleted."""
    of_trials = select(trials.c.source_checkpoint).where(
        trials.c.source_checkpoint.is_not(None), trials.c.state.not_in(TRIAL_ENDED)
    )
    of_experiments = select(experiments.c.source_checkpoint).where(
        experiments.c.source_checkpoint.is_not(None), experiments.c.state.not_in(EXPERIMENT_ENDED)
    )
    waiting = of_trials.union(of_experiments).subquery()
    return select(waiting.c.source_checkpoint)
