"""Why trials and experiments wait, as the scheduler said last; kept in memory, never stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerolab.scheduler import Decision, Request
from zeroserver.states import ExperimentState, TrialState

__all__ = ["Waiting", "changed_reasons"]

_LATER = "earlier trials of its experiment go first"


@dataclass(frozen=True)
class Waiting:
    """The reasons of one round; a new round makes a new one, so that any thread may read it."""

    trials: Mapping[int, str] = field(default_factory=dict)
    """Trial to its reason."""
    experiments: Mapping[int, str] = field(default_factory=dict)
    """Experiment of which nothing runs to the reason of its first trial."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """Trial to its experiment."""
    queued: frozenset[int] = frozenset()
    """Experiments of which trials wait."""

    @classmethod
    def after(
        cls,
        decision: Decision,
        waiting: list[Request],
        running: set[int],
        restarting: Mapping[int, tuple[int, str]],
    ) -> "Waiting":
        """Collect the reasons of a round.

        Args:
            decision: What the scheduler said.
            waiting: What it was asked, the first to run first within an experiment.
            running: Experiments that hold slots now.
            restarting: Trial to its experiment and the reason, where it is not its turn because
                it failed a moment ago.
        """
        told = {trial: text for trial, (_, text) in restarting.items()} | decision.waiting
        homes = {trial: home for trial, (home, _) in restarting.items()}
        homes |= {request.trial_id: request.experiment_id for request in waiting}
        experiments: dict[int, str] = {}
        for trial in sorted(told):
            if homes[trial] not in running:
                experiments.setdefault(homes[trial], told[trial])
        return cls(told, experiments, homes, frozenset(homes.values()))

    def of_trial(
        self, trial_id: int, experiment_id: int, state: str, run_id: int | None
    ) -> str | None:
        """Why a trial waits; None when it does not, is starting, or nobody has looked yet."""
        if state != TrialState.QUEUED or run_id is not None:
            return None
        looked_at = experiment_id in self.queued  # a round looks at the first trials of each
        return self.trials.get(trial_id, _LATER if looked_at else None)

    def of_experiment(self, experiment_id: int, state: str) -> str | None:
        """Why nothing of an experiment runs; None when something does."""
        if state != ExperimentState.ACTIVE:
            return None
        return self.experiments.get(experiment_id)


def changed_reasons(before: Waiting, now: Waiting) -> tuple[dict[int, int], set[int]]:
    """Find what must be told to those who watch.

    Returns:
        Trials whose reason is another one now, each with its experiment; and such experiments.
    """
    homes = {**before.homes, **now.homes}
    trials = {
        trial: homes[trial]
        for trial in before.trials.keys() | now.trials.keys()
        if before.trials.get(trial) != now.trials.get(trial)
    }
    ids = before.experiments.keys() | now.experiments.keys()
    told = {one for one in ids if before.experiments.get(one) != now.experiments.get(one)}
    return trials, told
