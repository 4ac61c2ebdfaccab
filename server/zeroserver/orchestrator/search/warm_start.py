"""Trials that start with the weights of another trial, and the wait for its checkpoint.

A searcher names a trial (``Create.source``), a user a trial or a checkpoint (``searcher``'s
``source_trial_id``, ``source_checkpoint_uuid``). Which checkpoint is meant is settled once and
stored with the trial, so that neither a restart of the trial nor one of the server changes it:

- a user's: at submission, the newest of the trial;
- a searcher's: the one of the newest validation that the searcher had received, or the first
  after it. Until that is there, the trial waits; when none can come, its newest is taken.
"""

from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, select, text, update

from zerolab.contract.spec import CheckpointRef
from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Create
from zeroserver.orchestrator.checkpoints.short_uuids import full_uuid
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import EXPERIMENT_ENDED, TRIAL_ENDED, TrialState
from zeroserver.store.rows import CheckpointRow, TrialRow, read_row
from zeroserver.store.schema import WEIGHTS_MISSING, checkpoints, experiments, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.searcher.section import SearcherConfig

__all__ = ["NO_WEIGHTS", "WarmStartService", "needed_for_warm_start"]

_MOST_TOLD = 1000
_ANY_MISSING = f"SELECT 1 FROM trials WHERE {WEIGHTS_MISSING} LIMIT 1"  # noqa: S608 - our own words
NO_WEIGHTS = ""
"""In ``trials.source_checkpoint``: the source has no checkpoint, and will have none."""


class WarmStartService(Service):
    """Chooses and protects the checkpoints from which trials start."""

    searches = Uses(SearchService)

    def source_of_experiment(self, searcher: "SearcherConfig") -> str | None:
        """Return the checkpoint that the trials of a new experiment start from, if any.

        Raises:
            ConfigError: If it is not there.
        """
        uuid, trial_id = searcher.source_checkpoint_uuid, searcher.source_trial_id
        if uuid is not None:
            uuid = full_uuid(self.work.connection, uuid)
            if self._complete(uuid) is None:
                problem = (
                    f"must be a checkpoint that is there, got {uuid}; `zerolab checkpoint list`"
                )
                raise ConfigError("experiment", [f"searcher.source_checkpoint_uuid: {problem}"])
            return uuid
        if trial_id is None:
            return None
        checkpoint = self.newest_checkpoint(trial_id)
        if checkpoint is None:
            query = self.work.connection.scalar(select(trials.c.id).where(trials.c.id == trial_id))
            problem = "has no checkpoint" if query is not None else "does not exist"
            line = f"must be a trial with a checkpoint, got {trial_id}, which {problem}"
            raise ConfigError("experiment", [f"searcher.source_trial_id: {line}"])
        return checkpoint

    def source_of_trial(self, experiment_id: int, operation: Create) -> dict[str, Any]:
        """Return the columns of a new trial that say with whose weights the searcher has it begin.

        A source that a user has deleted is one without a checkpoint.

        Raises:
            ConfigError: If the searcher names a trial that it has not created.
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
        """Settle, for trials that wait for a checkpoint of this one, which it is, if that is clear.

        Returns:
            Whether one of them waits no more.
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
        """Return a checkpoint's uuid, :data:`NO_WEIGHTS`, or None while one may yet come."""
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
        """Return the uuid of the complete checkpoint of a trial that goes furthest."""
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
            return "the trial with whose weights it begins has been deleted"
        if uuid == NO_WEIGHTS:
            return f"trial {trial.source_trial_id}, with whose weights it begins, has no checkpoint"
        return self.checkpoint_problem(uuid)

    def checkpoint_problem(self, uuid: str) -> str | None:
        """Return why trials cannot start from a checkpoint; None if they can."""
        if self._complete(uuid) is None:
            return f"checkpoint {uuid}, with whose weights it begins, has been deleted"
        return None

    def reference(self, trial: TrialRow) -> CheckpointRef | None:
        """Return what a trial without a checkpoint of its own begins with."""
        uuid = trial.source_checkpoint
        if not uuid:
            return None
        row = self._complete(uuid)
        assert row is not None, "source_problem is asked first"
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
            .limit(_MOST_TOLD)
        )
        return {
            row.id: (
                row.experiment_id,
                f"it begins with the weights of trial {row.source_trial_id}, and waits for a "
                "checkpoint of it",
            )
            for row in self.work.connection.execute(query)
        }

    def forget_source(self, trial_id: int) -> None:
        """Let no trial wait for a checkpoint of one that is deleted."""
        waiting = update(trials).where(
            trials.c.source_trial_id == trial_id, trials.c.source_checkpoint.is_(None)
        )
        self.work.connection.execute(waiting.values(source_checkpoint=NO_WEIGHTS))

    def refuse_while_needed(self, thing: str, whose: ColumnElement[bool]) -> None:
        """Refuse to delete an experiment or trial whose checkpoints another one starts from.

        Args:
            thing: What is to be deleted, as in "trial 3".
            whose: Which checkpoints go with it.

        Raises:
            ConflictError: If one does; it names it.
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
                f"{thing}: holds a checkpoint with whose weights trials of experiment "
                f"{experiment_id} begin; "
                "delete it when that one has ended, or kill that one first"
            )
            raise ConflictError(msg)

    def _complete(self, uuid: str) -> CheckpointRow | None:
        query = select(checkpoints).where(
            checkpoints.c.uuid == uuid, checkpoints.c.state == "COMPLETED"
        )
        return read_row(self.work.connection, CheckpointRow, query)


def needed_for_warm_start() -> Select[tuple[str]]:
    """Select the checkpoints that trials will yet begin with, and that must not be deleted."""
    of_trials = select(trials.c.source_checkpoint).where(
        trials.c.source_checkpoint.is_not(None), trials.c.state.not_in(TRIAL_ENDED)
    )
    of_experiments = select(experiments.c.source_checkpoint).where(
        experiments.c.source_checkpoint.is_not(None), experiments.c.state.not_in(EXPERIMENT_ENDED)
    )
    waiting = of_trials.union(of_experiments).subquery()
    return select(waiting.c.source_checkpoint)
