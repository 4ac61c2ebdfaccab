"""The helper until: results, exceptions and messages."""

import itertools

import pytest

from tests.waiting import until


def test_until_returns_accepted_value() -> None:
    numbers = itertools.count()
    assert until("a number is large", lambda: next(numbers), lambda number: number > 3) == 4


def test_until_retries_not_yet_exceptions() -> None:
    responses = iter([ValueError("no"), "yes"])

    def probe() -> str:
        response = next(responses)
        if isinstance(response, Exception):
            raise response
        return response

    assert until("it answers", probe, not_yet=ValueError) == "yes"


def test_until_raises_other_exceptions() -> None:
    with pytest.raises(ZeroDivisionError):
        until("it can be divided", lambda: 1 / 0, not_yet=ValueError)


def test_until_failure_names_last_value() -> None:
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
