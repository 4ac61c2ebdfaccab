"""Waiting is done in one place, and what was waited for in vain is named."""

import itertools

import pytest

from tests.waiting import until


def test_what_was_accepted_is_returned() -> None:
    numbers = itertools.count()
    assert until("a number is large", lambda: next(numbers), lambda number: number > 3) == 4


def test_an_exception_that_means_not_yet_is_waited_out() -> None:
    answers = iter([ValueError("no"), "yes"])

    def look() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert until("it answers", look, not_yet=ValueError) == "yes"


def test_any_other_exception_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        until("it can be divided", lambda: 1 / 0, not_yet=ValueError)


def test_what_does_not_happen_is_named_with_what_was_seen_last() -> None:
    with pytest.raises(AssertionError) as caught:
        until("the door is open", lambda: "shut", lambda door: door == "open", deadline_s=0)
    assert str(caught.value) == "not within 0 s: the door is open; last seen: 'shut'"
    with pytest.raises(AssertionError, match=r"last seen: ZeroDivisionError.*\nthe log"):
        until(
            "it can be divided",
            lambda: 1 / 0,
            not_yet=ZeroDivisionError,
            details=lambda: "the log",
            deadline_s=0,
        )
