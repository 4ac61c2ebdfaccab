"""Continuation of ended trials from their newest checkpoints."""

from typing import Any

import msgspec
from sqlalchemy import select

from zerolab.errors import ConflictError
from zeroserver.orchestrator.lifecycle import LifecycleService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import (
    SearchService,
)
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import (
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_ACTIONS,
    ExperimentState,
    TrialState,
)
from zeroserver.store.rows import ExperimentRow, TrialRow
from zeroserver.store.schema import trials

__all__ = ["ContinuationService", "is_unfinished", "other_weights", "refuse_while_deleted"]


class ContinuationService(Service):
    """Continues ended trials."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)
    warm_starts = Uses(WarmStartService)

    def continue_trial(self, trial_id: int) -> None:
        """Continue an ended trial that has training left, and reopen its experiment.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If it has not ended, has no training left, is finished for its searcher,
                or its initial weights are missing.
        """
        trial = self.work.find(TrialRow, trial_id)
        if not TRIAL_ACTIONS["continue"].wanted("trial", trial_id, trial.state):
            return
        experiment = self.work.experiment_of(trial)
        experiment_id = experiment.id
        refuse_while_deleted(experiment)
        if experiment.state in EXPERIMENT_STOPPING:
            msg = (
                f"trial {trial_id}: its experiment {experiment_id} is {experiment.state}; "
                "wait until it has "
                "ended, then retry"
            )
            raise ConflictError(msg)
        reason = self.remedy(trial) or self.no_weights(trial)
        if reason is not None:
            msg = f"trial {trial_id}: is {trial.state} and cannot be continued: {reason}"
            raise ConflictError(msg)
        state = ExperimentState(experiment.state)
        single_trial_changes: dict[str, Any] = {}
        if state in EXPERIMENT_ENDED:
            self._refuse_between_parts(experiment_id)
            state = ExperimentState.ACTIVE
            single_trial_changes = {"waits": 0, "until": None}
            # The search has ended: only this trial continues.
            self.lifecycle.move_experiment(
                experiment, state, ended_at=None, error=None, archived=0, searcher_done=1,
            )  # fmt: skip
        self.lifecycle.reopen(trial, state, **single_trial_changes)
        self.scheduling.schedule()

    def _refuse_between_parts(self, experiment_id: int) -> None:
        """Refuse if a continuation of the whole experiment was interrupted.

        Raises:
            ConflictError: If some of its trials are paused, and so already reopened.
        """
        paused = select(trials.c.id).where(
            trials.c.experiment_id == experiment_id, trials.c.state == TrialState.PAUSED
        )
        if self.work.connection.scalar(paused.limit(1)) is not None:
            msg = (
                f"experiment {experiment_id}: is being continued; if that was interrupted, run "
                f"`zerolab experiment continue {experiment_id}` again"
            )
            raise ConflictError(msg)

    def remedy(self, trial: TrialRow) -> str | None:
        """Return why an ended trial has no training left, with a remedy; None if it has some."""
        trial_id, experiment_id = trial.id, trial.experiment_id
        searcher = self.work.config(experiment_id).searcher
        known_ends = (
            set() if searcher.rebuilds_on_growth else self.searches.ended_trials(experiment_id)
        )
        finished = trial.request_id in known_ends
        if not finished and is_unfinished(trial.state, trial.stop, trial.error, longer=False):
            return None
        reason = (
            f"the {searcher.name} searcher has finished it" if finished or trial.stop else
            "it has trained for its full length"
        )  # fmt: skip
        if self.warm_starts.newest_checkpoint(trial_id) is None:
            return (
                f"{reason}, and it has no checkpoint; "
                f"`zerolab experiment fork {experiment_id}` starts from the beginning"
            )
        remedy = f"`zerolab trial fork {trial_id}` starts a new experiment from its checkpoint"
        if searcher.has_one_trial:
            remedy += (
                f", `zerolab experiment continue {experiment_id} "
                "--set searcher.max_length.batches=...` trains it for longer"
            )
        return f"{reason}; {remedy}"

    def no_weights(self, trial: TrialRow) -> str | None:
        """Return why a trial cannot load its initial weights; None if it can."""
        latest = trial.latest_checkpoint or self.warm_starts.newest_checkpoint(trial.id)
        problem = self.warm_starts.source_problem(
            msgspec.structs.replace(trial, latest_checkpoint=latest)
        )
        if problem is None:
            return None
        return f"{problem}, and the trial has no checkpoint; {other_weights(trial.experiment_id)}"


def refuse_while_deleted(experiment: ExperimentRow) -> None:
    """Refuse to continue an experiment that is being deleted.

    Raises:
        ConflictError: If a part of it is deleted already.
    """
    if experiment.deleting:
        experiment_id = experiment.id
        msg = (
            f"experiment {experiment_id}: is being deleted; run `zerolab experiment delete "
            f"{experiment_id}` again if that was interrupted"
        )
        raise ConflictError(msg)


def other_weights(experiment_id: int) -> str:
    """Return the remedy for an experiment whose initial weights are missing."""
    return (
        f"`zerolab experiment fork {experiment_id}` starts a new experiment with another "
        "searcher.source_checkpoint_uuid"
    )


def is_unfinished(state: str, stop: str | None, error: str | None, *, longer: bool) -> bool:
    """Check whether an ended trial has training left.

    Args:
        state: Its state.
        stop: Who or what stopped it.
        error: Its error.
        longer: Whether its length was increased since it ended.
    """
    if stop == "searcher":
        return False
    if state == TrialState.COMPLETED:
        return longer and error is None  # an error here means invalid hyperparameters
    return True
