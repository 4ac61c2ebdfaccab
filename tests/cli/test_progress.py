"""Progress is told in one line a trial, in words and units that can be read."""

import math

import pytest

from zerolab.cli.output import duration, number, print_fields, print_table
from zerolab.cli.progress import TrialProgress, describe_line


def test_a_line_says_batch_loss_speed_and_what_is_left() -> None:
    line = describe_line(TrialProgress(3, "RUNNING", 120, 0.4, "loss", 0.123456, 812.4, 75.0))
    assert line == "trial 3  running  batch 120  loss 0.1235  812 samples/s  40 %  1 min 15 s left"


def test_what_is_not_known_yet_is_left_out() -> None:
    assert describe_line(TrialProgress(3, "QUEUED", 0, 0.0)) == "trial 3  queued  batch 0  0 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.5, "0.5"), (1234567.0, "1.235e+06"), ("NaN", "NaN"), (math.inf, "inf")],
)
def test_numbers_are_short(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.7, "1 min 0 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_times_are_told_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_show_what_users_wrote_as_they_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["id", "name"], [(1, "[bold]not markup[/bold]"), (2, None)])
    print_fields({"name": "a\nb", "nothing": None, "zero": 0})
    out = capsys.readouterr().out
    assert "[bold]not markup[/bold]" in out
    assert out.splitlines()[-3:] == ["name  a", "      b", "zero  0"]
