"""Pauses between the tries at reaching a server that is away."""

import random

__all__ = ["Backoff"]

_CHANCE = random.SystemRandom()
"""Not the generator that a user's training draws from: threads of ours would change its numbers."""


class Backoff:
    """How long to wait before the next try: twice as long each time, and never quite the same.

    Those whom a server has left alone do not all come back in the same moment.

    Args:
        first_s: The first pause, in seconds.
        longest_s: No pause is much longer, in seconds.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """Return how long to wait now, in seconds."""
        now_s = min(self._next_s, self._longest_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return now_s * _CHANCE.uniform(0.8, 1.2)

    def reset(self) -> None:
        """Begin again: the last try succeeded."""
        self._next_s = self._first_s
