"""Pauses between attempts to reach a server."""

import random

__all__ = ["Backoff"]

_JITTER = random.SystemRandom()
"""Separate from the generator of a user's training, whose numbers must not change."""


class Backoff:
    """Exponential backoff with random jitter.

    The jitter keeps clients from reconnecting at the same moment after an outage.

    Args:
        first_s: The first pause, in seconds.
        longest_s: Approximate maximum of a pause, in seconds.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """Return the next pause, in seconds."""
        now_s = min(self._next_s, self._longest_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return now_s * _JITTER.uniform(0.8, 1.2)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s
