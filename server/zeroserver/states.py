"""States of experiments, trials and runs, and the actions allowed in each state.

A *move* is a change of state by the orchestrator; an *action* is a user's request. Repeating an
action has no effect.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerolab.errors import ConflictError

__all__ = [
    "EXPERIMENT_ACTIONS",
    "EXPERIMENT_ENDED",
    "EXPERIMENT_MOVES",
    "EXPERIMENT_STOPPING",
    "RUN_MOVES",
    "TRIAL_ACTIONS",
    "TRIAL_ENDED",
    "TRIAL_MOVES",
    "TRIAL_OPEN",
    "Action",
    "ExperimentState",
    "RunState",
    "TrialState",
    "check_move",
]


class ExperimentState(StrEnum):
    """State of an experiment."""

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
    """State of a trial; a paused one has released its slots."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"


class RunState(StrEnum):
    """State of a run, which holds its slots until it has exited."""

    ASSIGNED = "ASSIGNED"
    RUNNING = "RUNNING"
    EXITED = "EXITED"


_E, _T, _R = ExperimentState, TrialState, RunState

EXPERIMENT_ENDED = frozenset({_E.COMPLETED, _E.CANCELED, _E.ERROR})
EXPERIMENT_STOPPING = frozenset(
    {_E.STOPPING_CANCELED, _E.STOPPING_KILLED, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}
)
TRIAL_ENDED = frozenset({_T.COMPLETED, _T.CANCELED, _T.ERROR})
TRIAL_OPEN = frozenset(_T) - TRIAL_ENDED

_STOPPED_BY_USER = frozenset({_E.STOPPING_CANCELED, _E.STOPPING_KILLED})

EXPERIMENT_MOVES: Mapping[str, frozenset[str]] = {
    _E.ACTIVE: frozenset({_E.PAUSED, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}) | _STOPPED_BY_USER,
    _E.PAUSED: frozenset({_E.ACTIVE, _E.STOPPING_COMPLETED, _E.STOPPING_ERROR}) | _STOPPED_BY_USER,
    _E.STOPPING_CANCELED: frozenset({_E.CANCELED, _E.STOPPING_KILLED}),
    _E.STOPPING_KILLED: frozenset({_E.CANCELED}),
    _E.STOPPING_COMPLETED: frozenset({_E.COMPLETED}) | _STOPPED_BY_USER,
    _E.STOPPING_ERROR: frozenset({_E.ERROR, _E.STOPPING_KILLED}),
    _E.COMPLETED: frozenset({_E.ACTIVE, _E.PAUSED}),  # only by `continue`, like the next two
    _E.CANCELED: frozenset({_E.ACTIVE, _E.PAUSED}),
    _E.ERROR: frozenset({_E.ACTIVE, _E.PAUSED}),
}

TRIAL_MOVES: Mapping[str, frozenset[str]] = {
    _T.QUEUED: frozenset({_T.RUNNING, _T.PAUSED, _T.STOPPING}) | TRIAL_ENDED,
    _T.RUNNING: frozenset({_T.QUEUED, _T.PAUSED, _T.STOPPING}) | TRIAL_ENDED,
    _T.PAUSED: frozenset({_T.QUEUED}) | TRIAL_ENDED,
    _T.STOPPING: TRIAL_ENDED,
    _T.COMPLETED: frozenset({_T.QUEUED, _T.PAUSED}),  # only by `continue`, like the next two
    _T.CANCELED: frozenset({_T.QUEUED, _T.PAUSED}),
    _T.ERROR: frozenset({_T.QUEUED, _T.PAUSED}),
}

RUN_MOVES: Mapping[str, frozenset[str]] = {
    _R.ASSIGNED: frozenset({_R.RUNNING, _R.EXITED}),
    _R.RUNNING: frozenset({_R.EXITED}),
    _R.EXITED: frozenset(),
}


class Action(msgspec.Struct, frozen=True):
    """User action and the states in which it is permitted."""

    does: frozenset[str]
    """States in which the action has an effect."""
    done: frozenset[str]
    """States in which the action is accepted but changes nothing."""
    participle: str
    """Participle for messages, as in "cannot be paused"."""
    instead: Mapping[str, str]
    """Advice for the user by state; ``{id}`` is replaced by the id."""

    def wanted(self, thing: str, number: int, state: str, remedy: str | None = None) -> bool:
        """Check whether the action has an effect in a state.

        Args:
            thing: ``experiment`` or ``trial``.
            number: Its id.
            state: Current state.
            remedy: Advice for the user that replaces the default one of the state.

        Raises:
            ConflictError: If the state does not allow it; the message has a remedy.
        """
        if state in self.does:
            return True
        if state in self.done:
            return False
        advice = remedy or self.instead[state].format(id=number)
        msg = f"{thing} {number}: is {state} and cannot be {self.participle}; {advice}"
        raise ConflictError(msg)


def _instead(states: frozenset[str], remedy: str) -> dict[str, str]:
    return dict.fromkeys(states, remedy)


_E_OPEN, _T_OPEN = frozenset({_E.ACTIVE, _E.PAUSED}), frozenset({_T.QUEUED, _T.RUNNING, _T.PAUSED})
_GO_ON = "`zerolab experiment continue {id}` continues it from its checkpoints"
_E_OVER = _instead(EXPERIMENT_ENDED, _GO_ON) | _instead(
    EXPERIMENT_STOPPING, "wait until it has ended; then " + _GO_ON
)
_END_FIRST = "`zerolab experiment cancel {id}` or `kill {id}` first, and wait until it has ended"
_E_NOT_OVER = _instead(_E_OPEN, _END_FIRST) | _instead(
    EXPERIMENT_STOPPING, "wait until it has ended, then retry"
)
_T_GO_ON = "`zerolab trial continue {id}` continues it from its checkpoint"
_T_STOPPING: Mapping[str, str] = {_T.STOPPING: "wait until it has ended, then retry"}
_T_OVER = {**_instead(TRIAL_ENDED, _T_GO_ON), **_T_STOPPING}
_T_END_FIRST = "`zerolab trial cancel {id}` or `kill {id}` first, and wait until it has ended"
_T_NOT_OVER = {**_instead(_T_OPEN, _T_END_FIRST), **_T_STOPPING}

EXPERIMENT_ACTIONS: Mapping[str, Action] = {
    "pause": Action(frozenset({_E.ACTIVE}), frozenset({_E.PAUSED}), "paused", _E_OVER),
    "activate": Action(frozenset({_E.PAUSED}), frozenset({_E.ACTIVE}), "activated", _E_OVER),
    "cancel": Action(
        _E_OPEN | {_E.STOPPING_COMPLETED},
        (EXPERIMENT_STOPPING - {_E.STOPPING_COMPLETED}) | EXPERIMENT_ENDED,
        "canceled",
        {},
    ),
    "kill": Action(
        _E_OPEN | (EXPERIMENT_STOPPING - {_E.STOPPING_KILLED}),
        frozenset({_E.STOPPING_KILLED}) | EXPERIMENT_ENDED,
        "killed",
        {},
    ),
    "archive": Action(EXPERIMENT_ENDED, frozenset(), "archived", _E_NOT_OVER),
    "unarchive": Action(frozenset(_E), frozenset(), "unarchived", {}),
    "delete": Action(EXPERIMENT_ENDED, frozenset(), "deleted", _E_NOT_OVER),
    "continue": Action(
        EXPERIMENT_ENDED,
        frozenset({_E.ACTIVE}),
        "continued",
        {_E.PAUSED: "`zerolab experiment activate {id}` resumes it"}
        | _instead(EXPERIMENT_STOPPING, "wait until it has ended, then retry"),
    ),
    "fork": Action(frozenset(_E), frozenset(), "forked", {}),
}
"""Actions on experiments."""

TRIAL_ACTIONS: Mapping[str, Action] = {
    "pause": Action(_T_OPEN, frozenset(), "paused", _T_OVER),
    "activate": Action(_T_OPEN, frozenset(), "activated", _T_OVER),  # a pause may be pending
    "cancel": Action(_T_OPEN, TRIAL_ENDED | {_T.STOPPING}, "canceled", {}),
    "kill": Action(_T_OPEN | {_T.STOPPING}, TRIAL_ENDED, "killed", {}),
    "archive": Action(TRIAL_ENDED, frozenset(), "archived", _T_NOT_OVER),
    "unarchive": Action(frozenset(_T), frozenset(), "unarchived", {}),
    "delete": Action(TRIAL_ENDED, frozenset(), "deleted", _T_NOT_OVER),
    "continue": Action(
        TRIAL_ENDED,
        frozenset({_T.QUEUED, _T.RUNNING}),
        "continued",
        {_T.PAUSED: "`zerolab trial activate {id}` resumes it", **_T_STOPPING},
    ),
    "fork": Action(frozenset(_T), frozenset(), "forked", {}),
}
"""Actions on trials."""


def check_move(moves: Mapping[str, frozenset[str]], thing: str, old: str, new: str) -> None:
    """Check that a transition is permitted.

    Raises:
        ConflictError: If ``moves`` does not list it; the message names ``thing``.
    """
    if new not in moves[old]:
        msg = f"{thing}: is {old} and cannot become {new}"
        raise ConflictError(msg)
