"""Arithmetic of rungs and brackets, in floating point as published."""

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
"""Maximum number of rungs of a bracket, and of brackets."""
MAX_DIVISOR = 1000
"""``MAX_DIVISOR ** MAX_RUNGS`` is still a finite floating-point number."""

Mode = Literal["aggressive", "standard", "conservative"]


class Bracket(NamedTuple):
    """Size of one ASHA bracket."""

    num_rungs: int
    """Number of comparisons of its trials, including the end of training."""
    max_trials: int
    """Number of its trials."""
    max_concurrent_trials: int
    """Maximum number of its trials that train at a time."""


def make_rungs(num_rungs: int, divisor: float, max_time: int) -> list[int]:
    """Return the lengths at which trials are compared.

    Each length is ``divisor`` times the previous one.

    Args:
        num_rungs: Number of rungs; at least 1.
        divisor: More than 1.
        max_time: Length of the last rung, in any unit.

    Returns:
        ``max(floor(max_time / divisor ** (num_rungs - 1 - i)), 1)`` for each i.

    Example:
        >>> from zerolab.searcher.asha import make_rungs
        >>> make_rungs(num_rungs=3, divisor=4, max_time=800)
        [50, 200, 800]
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
        max_time: Maximum length of a trial, in any unit; at least 1.
        max_trials: Over all brackets; a bracket has at least one, so the sum may be greater.
        divisor: More than 1.
        mode: How early trials are stopped: one bracket with all rungs, brackets with at least
            half of them, or brackets down to one rung, which never stop a trial.
        max_rungs: Maximum number of rungs of a bracket.
        max_concurrent_trials: Over all brackets; 0 for as many in each as one full decision needs.
        bracket_rungs: Rungs of each bracket; replaces those of ``mode``.

    Returns:
        Brackets ``(num_rungs, max_trials, max_concurrent_trials)``.

    Example:
        >>> from zerolab.searcher.asha import make_brackets
        >>> make_brackets(max_time=100, max_trials=16, mode="aggressive")
        [Bracket(num_rungs=3, max_trials=16, max_concurrent_trials=16)]
    """
    most = min(max_rungs, _floor_log(max_time, divisor) + 1, _floor_log(max_trials, divisor) + 1)
    first = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[mode]
    rungs = sorted(bracket_rungs or range(first, most + 1), reverse=True)
    trials = _share_trials(rungs, divisor, max_trials)
    concurrent = _share_concurrent(trials, divisor, max_concurrent_trials)
    return [Bracket(*sizes) for sizes in zip(rungs, trials, concurrent, strict=True)]


def simulate(brackets: Sequence[Bracket], divisor: float, max_time: int) -> dict[int, int]:
    """Estimate how many trials end at which length.

    The estimate holds if all trials reached a rung at the same time.

    Args:
        brackets: Brackets of the search.
        divisor: More than 1.
        max_time: Maximum length of a trial.

    Returns:
        Length to number of trials, by rising length.

    Example:
        >>> from zerolab.searcher.asha import make_brackets, simulate
        >>> brackets = make_brackets(max_time=800, max_trials=16, mode="aggressive")
        >>> simulate(brackets, divisor=4, max_time=800)
        {50: 12, 200: 3, 800: 1}
    """
    ended: dict[int, int] = {}
    for bracket in brackets:
        remaining = bracket.max_trials
        for length in make_rungs(bracket.num_rungs, divisor, max_time)[:-1]:
            promoted = max(int(remaining / divisor), 1)
            ended[length] = ended.get(length, 0) + remaining - promoted
            remaining = promoted
        ended[max_time] = ended.get(max_time, 0) + remaining
    return {length: number for length, number in sorted(ended.items()) if number}


def _floor_log(value: float, base: float) -> int:
    # As published, without a correction of rounding: log(1000) / log(10) is less than 3. Another
    # formula would give a search other brackets than the same configuration has in Determined.
    return int(math.log(value) / math.log(base))


def _share_trials(rungs: Sequence[int], divisor: float, max_trials: int) -> list[int]:
    """Share trials by weight: brackets with more rungs stop more trials early, and get more."""
    weights = [float(divisor) ** (count - 1) / count for count in rungs]
    total = sum(weights)
    shares = [max(int(weight / total * max_trials), 1) for weight in weights]
    shares[0] += max(max_trials - sum(shares), 0)
    return shares


def _share_concurrent(trials: Sequence[int], divisor: float, concurrent: int) -> list[int]:
    if concurrent == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    share, remainder = divmod(max(concurrent, len(trials)), len(trials))
    return [share + (index < remainder) for index in range(len(trials))]
