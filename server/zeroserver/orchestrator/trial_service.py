"""Trials: user actions and deletion."""

from zerolab.errors import ConflictError
from zeroserver.orchestrator.checkpoints.checkpoint_service import CheckpointService
from zeroserver.orchestrator.checkpoints.model_service import ModelService
from zeroserver.orchestrator.continuation import ContinuationService
from zeroserver.orchestrator.lifecycle import LifecycleService, resting_state
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import (
    EXPERIMENT_ENDED,
    TRIAL_ACTIONS,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
)
from zeroserver.store.rows import TrialRow
from zeroserver.store.schema import checkpoints, trials

__all__ = ["TrialService"]


class TrialService(Service):
    """Carries out user actions on trials and deletes trials."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    runs = Uses(RunService)
    continuations = Uses(ContinuationService)
    scheduling = Uses(SchedulingService)
    checkpoints = Uses(CheckpointService)
    models = Uses(ModelService)
    warm_starts = Uses(WarmStartService)

    def act(self, trial_id: int, action: str) -> None:
        """Pause, activate, cancel, kill, archive or unarchive a trial; idempotent.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If its state, or its experiment's, does not allow it.
        """
        trial = self.work.find(TrialRow, trial_id)
        rule, state = TRIAL_ACTIONS[action], trial.state
        ended = state in TRIAL_ENDED and state in rule.instead
        remedy = self.continuations.remedy(trial) if ended else None
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
            self.scheduling.schedule()

    def _pause(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, held=1)
        if trial.run_id is not None:
            self.runs.direct(trial.run_id, "preempt")
        else:
            self.lifecycle.move_trial(trial, TrialState.PAUSED)

    def _activate(self, trial: TrialRow) -> None:
        """Undo a pause by a user; refuse if the experiment or the searcher paused the trial."""
        experiment = self.work.experiment_of(trial)
        trial_id, experiment_id = trial.id, experiment.id
        if trial.run_id is None and experiment.state != ExperimentState.ACTIVE:
            msg = (
                f"trial {trial_id}: its experiment {experiment_id} is {experiment.state}; "
                f"`zerolab experiment activate {experiment_id}` first"
            )
            raise ConflictError(msg)
        if trial.run_id is None and trial.waits and not trial.held:
            msg = (
                f"trial {trial_id}: waits for the searcher, "
                "which resumes it if it is among the best; "
                f"to train it anyway, run `zerolab trial fork {trial_id}`"
            )
            raise ConflictError(msg)
        self.work.save(trials, trial_id, held=0)
        if trial.run_id is None:
            self.lifecycle.move_trial(
                trial, resting_state(ExperimentState.ACTIVE, waits=trial.waits)
            )

    def _cancel(self, trial: TrialRow) -> None:
        self.operations.stop_trial(trial, "cancel")

    def _kill(self, trial: TrialRow) -> None:
        self.operations.stop_trial(trial, "kill")

    def _archive(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, archived=1)

    def _unarchive(self, trial: TrialRow) -> None:
        self.work.save(trials, trial.id, archived=0)

    def remove(self, trial_id: int) -> bool:
        """Delete a trial of an ended experiment with its metrics, logs and checkpoints.

        One call deletes a limited number of checkpoints: call it again until it returns True.

        The searcher's events are kept, so that a continued experiment does not create the trial
        again; the searcher is then informed that the trial was canceled.

        Returns:
            Whether all of it is deleted.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If it or its experiment has not ended, another experiment starts from one
                of its checkpoints, or one of them is registered.
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
        of_trial = checkpoints.c.trial_id == trial_id
        self.warm_starts.refuse_while_needed(f"trial {trial_id}", of_trial)
        self.models.refuse_while_registered(f"trial {trial_id}", of_trial)
        self.work.touch("trial", experiment_id, trial_id)
        self.work.touch("experiment", experiment_id, experiment_id)
        if self.checkpoints.delete_some(experiment_id, of_trial):
            return False
        self.warm_starts.forget_source(trial_id)
        self.lifecycle.remove_trials(experiment_id, [trial_id])
        self.lifecycle.count_trials(experiment)
        return True
