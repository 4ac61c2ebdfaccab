"""The states of experiments, trials and runs: one table of legal transitions for each."""

from collections.abc import Mapping
from enum import StrEnum

from zerolab.errors import ConflictError

__all__ = [
    "EXPERIMENT_ENDED",
    "EXPERIMENT_MOVES",
    "EXPERIMENT_STOPPING",
    "RUN_MOVES",
    "TRIAL_ENDED",
    "TRIAL_MOVES",
    "ExperimentState",
    "RunState",
    "TrialState",
    "check_move",
]


class ExperimentState(StrEnum):
    """Where an experiment stands."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"


class TrialState(StrEnum):
    """Where a trial stands. PAUSED: it gave its slots back and waits."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"


class RunState(StrEnum):
    """Where a run stands; it holds its slots until it has exited."""

    ASSIGNED = "ASSIGNED"
    RUNNING = "RUNNING"
    EXITED = "EXITED"


_E, _T, _R = ExperimentState, TrialState, RunState

EXPERIMENT_ENDED = frozenset({_E.COMPLETED, _E.CANCELED, _E.ERROR})
EXPERIMENT_STOPPING = frozenset(
    {_E.STOPPING_CANCELED, _E.STOPPING_KILLED, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}
)
TRIAL_ENDED = frozenset({_T.COMPLETED, _T.CANCELED, _T.ERROR})

_TOLD_TO_STOP = frozenset({_E.STOPPING_CANCELED, _E.STOPPING_KILLED})

EXPERIMENT_MOVES: Mapping[str, frozenset[str]] = {
    _E.ACTIVE: frozenset({_E.PAUSED, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}) | _TOLD_TO_STOP,
    _E.PAUSED: frozenset({_E.ACTIVE, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}) | _TOLD_TO_STOP,
    _E.STOPPING_CANCELED: frozenset({_E.CANCELED, _E.STOPPING_KILLED}),
    _E.STOPPING_KILLED: frozenset({_E.CANCELED}),
    _E.STOPPING_COMPLETED: frozenset({_E.COMPLETED}) | _TOLD_TO_STOP,
    _E.STOPPING_ERROR: frozenset({_E.ERROR, _E.STOPPING_KILLED}),
    _E.COMPLETED: frozenset(),
    _E.CANCELED: frozenset(),
    _E.ERROR: frozenset(),
}

TRIAL_MOVES: Mapping[str, frozenset[str]] = {
    _T.QUEUED: frozenset({_T.RUNNING, _T.PAUSED, _T.STOPPING}) | TRIAL_ENDED,
    _T.RUNNING: frozenset({_T.QUEUED, _T.PAUSED, _T.STOPPING}) | TRIAL_ENDED,
    _T.PAUSED: frozenset({_T.QUEUED}) | TRIAL_ENDED,
    _T.STOPPING: TRIAL_ENDED,
    _T.COMPLETED: frozenset(),
    _T.CANCELED: frozenset(),
    _T.ERROR: frozenset(),
}

RUN_MOVES: Mapping[str, frozenset[str]] = {
    _R.ASSIGNED: frozenset({_R.RUNNING, _R.EXITED}),
    _R.RUNNING: frozenset({_R.EXITED}),
    _R.EXITED: frozenset(),
}


def check_move(moves: Mapping[str, frozenset[str]], thing: str, old: str, new: str) -> None:
    """Let a transition pass, or refuse it.

    Raises:
        ConflictError: If ``moves`` does not list it; the message names ``thing``.
    """
    if new not in moves[old]:
        msg = f"{thing}: is {old} and cannot become {new}"
        raise ConflictError(msg)
