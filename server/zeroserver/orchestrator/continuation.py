"""Continuation of trials that have ended, from their newest checkpoints."""

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
    """Continues trials that have ended."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)
    warm_starts = Uses(WarmStartService)

    def continue_trial(self, trial_id: int) -> None:
        """Continue a trial that ended before its full length, with its experiment.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If it has not ended, has nothing left to do, its searcher is through with
                it, or the weights that it would begin with are gone.
        """
        trial = self.work.find(TrialRow, trial_id)
        if not TRIAL_ACTIONS["continue"].wanted("trial", trial_id, trial.state):
            return
        experiment = self.work.experiment_of(trial)
        home = experiment.id
        refuse_while_deleted(experiment)
        if experiment.state in EXPERIMENT_STOPPING:
            msg = (
                f"trial {trial_id}: its experiment {home} is {experiment.state}; "
                "wait until it has "
                "ended, then ask again"
            )
            raise ConflictError(msg)
        reason = self.remedy(trial) or self.no_weights(trial)
        if reason is not None:
            msg = f"trial {trial_id}: is {trial.state} and cannot be continued: {reason}"
            raise ConflictError(msg)
        state = ExperimentState(experiment.state)
        single_trial_changes: dict[str, Any] = {}
        if state in EXPERIMENT_ENDED:
            self._refuse_between_parts(home)
            state = ExperimentState.ACTIVE
            single_trial_changes = {"waits": 0, "until": None}
            # The search has ended: only this trial continues.
            self.lifecycle.move_experiment(
                experiment, state, ended_at=None, error=None, archived=0, searcher_done=1,
            )  # fmt: skip
        self.lifecycle.reopen(trial, state, **single_trial_changes)
        self.scheduling.schedule()

    def _refuse_between_parts(self, experiment_id: int) -> None:
        """Refuse a trial of an experiment of which some trials are reopened already."""
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
        number, home = trial.id, trial.experiment_id
        searcher = self.work.config(home).searcher
        known_ends = set() if searcher.rebuilds_on_growth else self.searches.ended_trials(home)
        through = trial.request_id in known_ends
        if not through and is_unfinished(trial.state, trial.stop, trial.error, longer=False):
            return None
        reason = (
            f"the {searcher.name} searcher is through with it" if through or trial.stop else
            "it has trained to its length"
        )  # fmt: skip
        if self.warm_starts.newest_checkpoint(number) is None:
            return (
                f"{reason}, and no checkpoint of it is left; "
                f"`zerolab experiment fork {home}` begins anew"
            )
        ways = (
            f"`zerolab trial fork {number}` trains on from its checkpoint "
            "as an experiment of its own"
        )
        if searcher.has_one_trial:
            ways += (
                f", `zerolab experiment continue {home} --set searcher.max_length.batches=...` to "
                "a greater length"
            )
        return f"{reason}; {ways}"

    def no_weights(self, trial: TrialRow) -> str | None:
        """Return why a trial lost the checkpoint that it started from; None if it did not."""
        latest = trial.latest_checkpoint or self.warm_starts.newest_checkpoint(trial.id)
        problem = self.warm_starts.source_problem(
            msgspec.structs.replace(trial, latest_checkpoint=latest)
        )
        if problem is None:
            return None
        return f"{problem}, and it has none of its own; {other_weights(trial.experiment_id)}"


def refuse_while_deleted(experiment: ExperimentRow) -> None:
    """Let nothing of an experiment continue of which a part is deleted.

    Raises:
        ConflictError: If it is one.
    """
    if experiment.deleting:
        experiment_id = experiment.id
        msg = (
            f"experiment {experiment_id}: is being deleted; run `zerolab experiment delete "
            f"{experiment_id}` again if that was interrupted"
        )
        raise ConflictError(msg)


def other_weights(experiment_id: int) -> str:
    """Return the remedy for an experiment whose first weights are gone."""
    return (
        f"`zerolab experiment fork {experiment_id}` begins anew, with another "
        "searcher.source_checkpoint_uuid"
    )


def is_unfinished(state: str, stop: str | None, error: str | None, *, longer: bool) -> bool:
    """Check whether an ended trial has training left.

    Args:
        state: Its state.
        stop: Who stopped it.
        error: Its error.
        longer: Whether its length is greater than when it ended.
    """
    if stop == "searcher":
        return False
    if state == TrialState.COMPLETED:
        return longer and error is None  # else its hyperparameters are impossible
    return True
