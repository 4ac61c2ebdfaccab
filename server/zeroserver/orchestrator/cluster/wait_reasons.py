"""Reasons why trials and experiments wait, from the last scheduling round; in memory only."""

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from zerolab.scheduler import Decision, Request
from zeroserver.states import ExperimentState, TrialState

__all__ = ["Waiting", "changed_reasons"]

_LATER = "earlier trials of its experiment go first"
_MOST_TOLD = 200
"""Changes of one round that those who watch are told; others are seen where they are read."""


class Waiting(msgspec.Struct, frozen=True):
    """The reasons of one round; a new round makes a new one, so that any thread may read it."""

    trials: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Trial to its reason, the first to start first; of trials that are alike, the first."""
    homes: Mapping[int, int] = msgspec.field(default_factory=dict)
    """Trial to its experiment."""
    jobs: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Experiment of which trials wait to the reason of the first of them; or its searcher's."""
    running: frozenset[int] = frozenset()
    """Experiments that hold slots."""

    @classmethod
    def after(
        cls,
        decision: Decision,
        waiting: Iterable[Request],
        running: Iterable[int],
        restarting: Mapping[int, tuple[int, str]],
        unserved: Mapping[int, str],
    ) -> "Waiting":
        """Collect the reasons of a round.

        Args:
            decision: What the scheduler said.
            waiting: What it was asked.
            running: Experiments that hold slots now.
            restarting: Trial to its experiment and the reason, where it is not its turn because
                it failed a moment ago.
            unserved: Experiment to what its searcher waits for.
        """
        homes = {request.trial_id: request.job.job_id for request in waiting}
        homes |= {trial: home for trial, (home, _) in restarting.items()}
        reasons = decision.waiting | {trial: text for trial, (_, text) in restarting.items()}
        jobs: dict[int, str] = {}
        for trial, text in reasons.items():
            jobs.setdefault(homes[trial], text)
        jobs = {**unserved, **jobs}
        return cls(reasons, homes, jobs, frozenset(running))

    def of_trial(
        self, trial_id: int, experiment_id: int, state: str, run_id: int | None
    ) -> str | None:
        """Why a trial waits; None when it does not, is starting, or nobody has looked yet."""
        if state != TrialState.QUEUED or run_id is not None:
            return None
        return self.trials.get(trial_id, _LATER if experiment_id in self.jobs else None)

    def of_experiment(self, experiment_id: int, state: str) -> str | None:
        """Why nothing of an experiment runs; None when something does."""
        if state != ExperimentState.ACTIVE or experiment_id in self.running:
            return None
        return self.jobs.get(experiment_id)

    def of_job(self, experiment_id: int, state: str) -> str | None:
        """Why an experiment's next trial waits or is not asked for, whether or not others run."""
        return self.jobs.get(experiment_id) if state == ExperimentState.ACTIVE else None


def changed_reasons(before: Waiting, now: Waiting) -> tuple[dict[int, int], set[int]]:
    """Find what must be told to those who watch: the first changes, in the order of the queue.

    Returns:
        Trials whose reason is another one now, each with its experiment; and such experiments.
    """
    removed = (trial for trial in before.trials if trial not in now.trials)
    other = (trial for trial, text in now.trials.items() if before.trials.get(trial) != text)
    homes = {**before.homes, **now.homes}
    trials = {
        trial: homes[trial] for trial in (*islice(other, _MOST_TOLD), *islice(removed, _MOST_TOLD))
    }
    omitted = (job for job in before.jobs if job not in now.jobs)
    experiment_ids = (job for job, text in now.jobs.items() if before.jobs.get(job) != text)
    moved = before.running ^ now.running
    return trials, {*islice(experiment_ids, _MOST_TOLD), *islice(omitted, _MOST_TOLD), *moved}
