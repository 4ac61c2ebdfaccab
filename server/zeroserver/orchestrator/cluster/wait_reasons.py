"""Reasons why trials and experiments wait, from the last scheduling round, in memory."""

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from zerolab.scheduler import Decision, Request
from zeroserver.states import ExperimentState, TrialState

__all__ = ["Waiting", "changed_reasons"]

_LATER = "earlier trials of its experiment go first"
_MAX_PUBLISHED = 200
"""Maximum number of changes that one round publishes; clients see others after a reload."""


class Waiting(msgspec.Struct, frozen=True):
    """Reasons to wait of one scheduling round; immutable, so any thread may read it."""

    trials: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Trial to its reason, in the order of the queue; only the first of identical trials."""
    homes: Mapping[int, int] = msgspec.field(default_factory=dict)
    """Trial to its experiment."""
    jobs: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Experiment to the reason of its first waiting trial, or else of its searcher."""
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
            decision: Decision of the scheduler.
            waiting: Requests that the scheduler received.
            running: Experiments that hold slots now.
            restarting: Trial to its experiment and the reason, for trials that must not start yet.
            unserved: Experiment to the reason why its custom searcher waits.
        """
        homes = {request.trial_id: request.job.job_id for request in waiting}
        homes |= {trial: experiment_id for trial, (experiment_id, _) in restarting.items()}
        reasons = decision.waiting | {trial: text for trial, (_, text) in restarting.items()}
        jobs: dict[int, str] = {}
        for trial, text in reasons.items():
            jobs.setdefault(homes[trial], text)
        jobs = {**unserved, **jobs}
        return cls(reasons, homes, jobs, frozenset(running))

    def of_trial(
        self, trial_id: int, experiment_id: int, state: str, run_id: int | None
    ) -> str | None:
        """Return why a trial waits; None if it does not or no round has run yet."""
        if state != TrialState.QUEUED or run_id is not None:
            return None
        return self.trials.get(trial_id, _LATER if experiment_id in self.jobs else None)

    def of_experiment(self, experiment_id: int, state: str) -> str | None:
        """Return why no trial of an experiment runs; None if one does."""
        if state != ExperimentState.ACTIVE or experiment_id in self.running:
            return None
        return self.jobs.get(experiment_id)

    def of_job(self, experiment_id: int, state: str) -> str | None:
        """Return why an experiment's next trial waits, even if other trials run."""
        return self.jobs.get(experiment_id) if state == ExperimentState.ACTIVE else None


def changed_reasons(before: Waiting, now: Waiting) -> tuple[dict[int, int], set[int]]:
    """Return the first changes between two rounds, in the order of the queue.

    Returns:
        Trials with a changed reason, each with its experiment, and experiments with a changed
        reason.
    """
    removed = (trial for trial in before.trials if trial not in now.trials)
    updated = (trial for trial, text in now.trials.items() if before.trials.get(trial) != text)
    homes = {**before.homes, **now.homes}
    trials = {
        trial: homes[trial]
        for trial in (*islice(updated, _MAX_PUBLISHED), *islice(removed, _MAX_PUBLISHED))
    }
    removed_jobs = (job for job in before.jobs if job not in now.jobs)
    updated_jobs = (job for job, text in now.jobs.items() if before.jobs.get(job) != text)
    changed_running = before.running ^ now.running
    return trials, {
        *islice(updated_jobs, _MAX_PUBLISHED),
        *islice(removed_jobs, _MAX_PUBLISHED),
        *changed_running,
    }
