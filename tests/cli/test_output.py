"""Output about experiments that have ended."""

from typing import Any

import pytest

from zerolab.cli.log_stream import exit_code
from zerolab.cli.output import checkpoint_text, end_state, problem_lines, removed_values


def ended(state: str, failed: int = 0, canceled: int = 0, problem: str | None = None) -> Any:
    return {
        "state": state,
        "num_trials": 60,
        "failed_trials": failed,
        "canceled_trials": canceled,
        "result_problem": problem,
    }


@pytest.mark.parametrize(
    ("experiment", "text", "tone", "code"),
    [
        (ended("COMPLETED"), "COMPLETED", "green", 0),
        (ended("COMPLETED", failed=3), "COMPLETED (57 of 60, 3 failed)", "yellow", 3),
        (ended("COMPLETED", 3, 2), "COMPLETED (55 of 60, 3 failed, 2 canceled)", "yellow", 3),
        (ended("COMPLETED", problem="no number"), "COMPLETED", "yellow", 0),
        (ended("ERROR", failed=60, problem="boom"), "ERROR", "red", 1),
        (ended("CANCELED", canceled=60), "CANCELED", "", 1),
    ],
)
def test_state_shows_failed_trials(experiment: Any, text: str, tone: str, code: int) -> None:
    shown = end_state(experiment)
    assert (str(shown), shown.tone, exit_code(experiment)) == (text, tone, code)


def test_failure_differs_from_missing_result() -> None:
    failed = {"id": 6, "state": "ERROR", "result_problem": "boom", "best_validation": 0.9}
    empty = {"id": 7, "state": "COMPLETED", "result_problem": "no validation"}
    good = {"id": 8, "state": "COMPLETED", "result_problem": None}
    lines = problem_lines("trial", [failed, empty, good])
    assert lines == ["trial 6 failed: boom", "trial 7 has no result: no validation"]


def test_best_checkpoint_shows_metric() -> None:
    checkpoint = {"uuid": "e268e49e", "steps_completed": 400, "trial_id": 63}
    best = {"checkpoint": checkpoint, "validation": 0.9645, "note": None}
    text = checkpoint_text(best, "accuracy")
    assert text == "e268e49e  accuracy 0.9645, batch 400 of trial 63"
    assert checkpoint_text({**best, "checkpoint": None}, "accuracy") is None


@pytest.mark.parametrize(("days", "when"), [(30, " 30 days after its end"), (None, "")])
def test_removed_values_name_their_retention(days: int | None, when: str) -> None:
    policy = {"retention_policy": {"metric_retention_days": days}}
    expected = (
        f"experiment 4: most values of training and system metrics were removed{when} "
        "(retention_policy.metric_retention_days); about one of 1,024 steps is left"
    )
    assert removed_values({"id": 4, "config": policy}) == expected
