"""What may be taken without delaying one who waits: exact, and without guessing how long runs take.

One who waits for ``need`` units of something (slots of an agent, slots under a quota) goes on as
soon as what is free and what has been given back reach it. Nobody knows in which order the holders
give theirs back, so every sum of some of their holdings may be the one that does. The smallest
such sum leaves the least over; that much, and no more, can be lent to those behind, for good:
whatever order the holders end in, the one who waits goes on at the same moment.
"""

from collections.abc import Iterable

__all__ = ["lendable"]


def lendable(free: int, held: Iterable[int], need: int, surely: int = 0) -> int:
    """How many of the free units those behind may take without delaying one who needs ``need``.

    Args:
        free: Units that nobody holds.
        held: Units of each holder, given back all at once.
        need: Units that the one who waits needs at once.
        surely: Of the held units, those that are given back in any case before it can go on, for
            it waits for something else as well.

    Returns:
        At most ``free``; all of them if the need can never be met here.
    """
    missing = need - free
    sums = 1  # bit n: some of the holders have n units together
    for units in held:
        sums |= sums << units
    least = max(missing, surely, 0)
    enough = sums >> least
    if not enough:
        return free
    given_back = least + (enough & -enough).bit_length() - 1
    return min(free, given_back - missing)
