"""Promoting: trials pause at a rung, and the best of them go on from their checkpoints."""

import math

from zerolab.searcher.asha.rungs import Rank, Rungs, Verdict
from zerolab.searcher.operations import Continue, Operation, Stop

__all__ = ["PromotingRungs"]


class PromotingRungs(Rungs):
    """A bracket in which the best ``floor(n / divisor)`` of the n trials of a rung go on.

    A trial whose metric is not finite goes on nowhere, and is stopped. When all others have been
    judged and nobody may leave a rung, its best trial does: somebody always comes to the top.
    """

    def admit(self, trial_id: int) -> int:
        """Every trial pauses at the lowest rung first."""
        super().admit(trial_id)
        return self.lengths[0]

    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Put it into the rung that it was due at, once it has come there."""
        rung = self.due[trial_id]
        if length < self.lengths[rung]:
            return Verdict.GO_ON
        self.insert(rung, rank)
        return Verdict.STOP if rung == self.top or not _is_finite(rank) else Verdict.PAUSE

    def go_on(self) -> Operation | None:
        """Promote from the highest rung that has somebody to promote."""
        while (found := self._promotable()) is not None:
            operation = self._promote(*found)
            if operation is not None:
                return operation
        return None

    def last_chance(self) -> Operation | None:
        """Promote from the lowest rung that nobody has left."""
        while (found := self._stuck()) is not None:
            operation = self._promote(*found) or self.go_on()
            if operation is not None:
                return operation
        return None

    def _wait_again(self, former: int, able: set[int]) -> set[int]:
        """All, for more of a rung go on when more come there; none from the top."""
        if self.top > former:
            return able
        return able - {rank[2] for rank in self.rungs[self.top]}

    def _promotable(self) -> tuple[int, int] | None:
        """A rung, and a trial that should leave it."""
        for rung in range(self.top - 1, -1, -1):
            best = int(len(self.rungs[rung]) / self.divisor)
            trial_id = self._first_of(rung, best)
            if trial_id is not None:
                return rung, trial_id
        return None

    def _stuck(self) -> tuple[int, int] | None:
        """A rung that nobody has left, and its best trial that still can."""
        for rung in range(self.top):
            if self._went_on[rung].isdisjoint(rank[2] for rank in self.rungs[rung]):
                trial_id = self._first_of(rung, len(self.rungs[rung]))
                if trial_id is not None:
                    return rung, trial_id
        return None

    def _first_of(self, rung: int, best: int) -> int | None:
        """The first of the ``best`` of a rung that has not left it and still can."""
        went_on = self._went_on[rung]
        for rank in self.rungs[rung][:best]:
            trial_id = rank[2]
            if trial_id not in went_on and trial_id in self.waiting and _is_finite(rank):
                return trial_id
        return None

    def _promote(self, rung: int, trial_id: int) -> Operation | None:
        """Have a trial train to the next rung, or judge it there if it has been so far already.

        Returns:
            What the trial shall do; None when it need do nothing, and waits at the next rung.
        """
        self.mark_gone_on(rung, trial_id)
        rank, length = self._last[trial_id]
        rung += 1
        if length < self.lengths[rung]:
            self.waiting.discard(trial_id)
            self.due[trial_id] = rung
            return Continue(trial_id, self.lengths[rung])
        self.insert(rung, rank)
        if rung < self.top:
            return None
        self.waiting.discard(trial_id)
        self.stopping.add(trial_id)
        self._resting.add(trial_id)
        return Stop(trial_id)


def _is_finite(rank: Rank) -> bool:
    return not rank[0] and math.isfinite(rank[1])
