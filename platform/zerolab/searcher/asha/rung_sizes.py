"""The published arithmetic of rungs and brackets, in floating point as it was published."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = [
    "MAX_DIVISOR",
    "MAX_RUNGS",
    "Bracket",
    "Mode",
    "make_brackets",
    "make_rungs",
    "simulate",
]

MAX_RUNGS = 100
"""Most rungs of a bracket, and most brackets."""
MAX_DIVISOR = 1000
"""To the power of that many rungs it is still a floating-point number."""

Mode = Literal["aggressive", "standard", "conservative"]


class Bracket(NamedTuple):
    """One ASHA of several."""

    num_rungs: int
    """How often its trials are compared, the end of training included."""
    max_trials: int
    """How many trials it has."""
    max_concurrent_trials: int
    """How many of them train at a time."""


def make_rungs(num_rungs: int, divisor: float, max_time: int) -> list[int]:
    """Lengths at which trials are compared: each ``divisor`` times the one before.

    Args:
        num_rungs: How many; at least 1.
        divisor: More than 1.
        max_time: The last length, in any unit.

    Returns:
        ``max(floor(max_time / divisor ** (num_rungs - 1 - i)), 1)`` for each i.
    """
    powers = range(num_rungs - 1, -1, -1)
    return [max(int(max_time / float(divisor) ** power), 1) for power in powers]


def make_brackets(
    *,
    max_time: int,
    max_trials: int,
    divisor: float = 4,
    mode: Mode = "standard",
    max_rungs: int = 5,
    max_concurrent_trials: int = 16,
    bracket_rungs: Sequence[int] = (),
) -> list[Bracket]:
    """Choose the brackets of adaptive ASHA, the one with most rungs first.

    Args:
        max_time: How far a trial may train, in any unit; at least 1.
        max_trials: Over all brackets; a bracket has at least one, so there may be more.
        divisor: More than 1.
        mode: How early trials are stopped: one bracket with all rungs, brackets with at least
            half of them, or brackets down to one rung, which stop nobody.
        max_rungs: Most rungs of a bracket.
        max_concurrent_trials: Over all brackets; 0 for as many in each as make one full decision.
        bracket_rungs: Rungs of each bracket, in place of what ``mode`` says.
    """
    most = min(max_rungs, _floor_log(max_time, divisor) + 1, _floor_log(max_trials, divisor) + 1)
    first = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[mode]
    rungs = sorted(bracket_rungs or range(first, most + 1), reverse=True)
    trials = _share_trials(rungs, divisor, max_trials)
    concurrent = _share_concurrent(trials, divisor, max_concurrent_trials)
    return [Bracket(*each) for each in zip(rungs, trials, concurrent, strict=True)]


def simulate(brackets: Sequence[Bracket], divisor: float, max_time: int) -> dict[int, int]:
    """Say how many trials end at which length, if trials came to a rung all at once.

    Args:
        brackets: Of the search.
        divisor: More than 1.
        max_time: How far a trial may train.

    Returns:
        Length to number of trials, in rising order of lengths.
    """
    ended: dict[int, int] = {}
    for bracket in brackets:
        left = bracket.max_trials
        for length in make_rungs(bracket.num_rungs, divisor, max_time)[:-1]:
            going_on = max(int(left / divisor), 1)
            ended[length] = ended.get(length, 0) + left - going_on
            left = going_on
        ended[max_time] = ended.get(max_time, 0) + left
    return {length: number for length, number in sorted(ended.items()) if number}


def _floor_log(value: float, base: float) -> int:
    return int(math.log(value) / math.log(base))


def _share_trials(rungs: Sequence[int], divisor: float, max_trials: int) -> list[int]:
    """By weight: a bracket with more rungs stops more trials early, and has more of them."""
    weights = [float(divisor) ** (count - 1) / count for count in rungs]
    total = sum(weights)
    shares = [max(int(weight / total * max_trials), 1) for weight in weights]
    shares[0] += max(max_trials - sum(shares), 0)
    return shares


def _share_concurrent(trials: Sequence[int], divisor: float, concurrent: int) -> list[int]:
    if concurrent == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    each, rest = divmod(max(concurrent, len(trials)), len(trials))
    return [each + (index < rest) for index in range(len(trials))]
