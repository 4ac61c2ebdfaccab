"""Progress lines of trials, in readable units."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from zerolab.cli.output import age, number, print_fields, print_table
from zerolab.extensions.live_progress import ProgressLines, TrialProgress, describe_line
from zerolab.formatting import duration_text


def test_line_has_batch_loss_speed_and_time() -> None:
    line = describe_line(TrialProgress(3, "RUNNING", 120, 0.4, "loss", 0.123456, 812.4, 75.0))
    assert line == "trial 3  running  batch 120  loss 0.1235  812 samples/s  40 %  1 min 15 s left"


def test_unknown_values_are_omitted() -> None:
    line = describe_line(TrialProgress(3, "RUNNING", 1, 0.0, activity="training"))
    assert line == "trial 3  running  batch 1  0 %"


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        ("QUEUED", {}, "queued:  waiting for the scheduler"),
        ("QUEUED", {"assigned": True}, "starting:  preparing the run"),
        (
            "QUEUED",
            {"assigned": True, "activity": "starting Python and importing torch"},
            "starting:  starting Python and importing torch",
        ),
        (
            "RUNNING",
            {"assigned": True},
            "running  importing the code and building the trial",
        ),
        ("RUNNING", {"activity": "validating"}, "running  validating"),
        ("RUNNING", {"value": 0.4}, "running  importing the code and building the trial"),
    ],
)
def test_line_before_first_batch_has_reason(
    state: str, more: dict[str, Any], expected: str
) -> None:
    assert describe_line(TrialProgress(3, state, 0, 0.0, **more)) == f"trial 3  {expected}"


@pytest.mark.parametrize(
    ("activity", "expected"),
    [
        ("restoring", "running  restoring  after batch 40"),
        ("checkpointing", "running  checkpointing  batch 40  loss 0.4  9 samples/s  20 %"),
    ],
)
def test_line_of_restart_has_no_metric_of_earlier_run(activity: str, expected: str) -> None:
    trial = TrialProgress(3, "RUNNING", 40, 0.2, "loss", 0.4, 9.0, activity=activity)
    assert describe_line(trial) == f"trial 3  {expected}"


def test_start_prints_line_for_each_step() -> None:
    lines = ProgressLines()
    steps = [
        TrialProgress(1, "QUEUED", 0, 0.0),
        TrialProgress(1, "QUEUED", 0, 0.0, assigned=True),
        TrialProgress(1, "QUEUED", 0, 0.0, assigned=True, activity="importing torch"),
        TrialProgress(1, "RUNNING", 0, 0.0, assigned=True, activity="importing torch"),
    ]
    shown = [line for step in steps for line in lines.next_lines([step, step], 1.0)]
    assert len(shown) == 4
    assert not any("batch 0" in line for line in shown[:3])


def test_waiting_trial_has_reason_only() -> None:
    waits = TrialProgress(3, "QUEUED", 0, 0.0, waiting="it needs 8 slots")
    assert describe_line(waits) == "trial 3  waits: it needs 8 slots"


def test_plain_output_is_rate_limited() -> None:
    lines = ProgressLines()

    def due_lines(now_s: float, batch: int, **more: Any) -> int:
        return len(lines.next_lines([TrialProgress(1, batch=batch, progress=0.0, **more)], now_s))

    waits = {"state": "QUEUED", "waiting": "it needs 8 slots"}
    assert [due_lines(t, 0, **waits) for t in (0.0, 5.0, 50.0)] == [1, 0, 0]
    assert due_lines(50.5, 0, state="QUEUED", waiting="another reason") == 1
    assert [due_lines(51 + t, t, state="RUNNING") for t in range(31)] == [1, *([0] * 9 + [1]) * 3]
    assert due_lines(82.0, 32, state="STOPPING") == 1
    unchanged = {"state": "RUNNING", "activity": "validating"}
    assert [due_lines(t, 0, **unchanged) for t in (100.0, 120.0, 140.0)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("passed", "text"),
    [({"seconds": 40}, "40 s"), ({"minutes": 12}, "12 min"), ({"hours": 30}, "1 d")],
)
def test_age_has_one_unit(passed: dict[str, int], text: str) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    moment = (now - timedelta(**passed)).isoformat().replace("+00:00", "Z")
    assert age(moment, now) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.5, "0.5"), (1234567.0, "1.235e+06"), ("NaN", "NaN"), (math.inf, "inf")],
)
def test_numbers_are_short(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.7, "1 min 0 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_tables_show_user_text_literally(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["id", "name"], [(1, "[bold]not markup[/bold]"), (2, None)])
    print_fields({"name": "a\nb", "nothing": None, "zero": 0})
    out = capsys.readouterr().out
    assert "[bold]not markup[/bold]" in out
    assert out.splitlines()[-3:] == ["name  a", "      b", "zero  0"]
