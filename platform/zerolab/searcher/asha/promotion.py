"""Rungs of a bracket: trials pause at one until they are promoted, or train on until stopped."""

import math

from zerolab.searcher.asha.rungs import Rank, Rungs, Verdict
from zerolab.searcher.operations import Continue, Operation, Stop

__all__ = ["PromotingRungs", "StoppingRungs"]


class PromotingRungs(Rungs):
    """Bracket that promotes the best ``floor(n / divisor)`` of the n trials of a rung.

    A trial whose metric is not finite is stopped and never promoted. When all other trials have
    been judged and no trial may leave a rung, its best trial is promoted: some trial always reaches
    the top.
    """

    def add_trial(self, trial_id: int) -> int:
        """Return the lowest rung: every trial pauses there first."""
        super().add_trial(trial_id)
        return self.lengths[0]

    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Insert the trial into its due rung, once it has reached the length."""
        rung = self.due[trial_id]
        if length < self.lengths[rung]:
            return Verdict.CONTINUE
        self.insert(rung, rank)
        return Verdict.STOP if rung == self.top or not _is_finite(rank) else Verdict.PAUSE

    def continue_paused_trial(self) -> Operation | None:
        """Promote from the highest rung that has a promotable trial."""
        while (candidate := self._promotable()) is not None:
            operation = self._promote(*candidate)
            if operation is not None:
                return operation
        return None

    def force_promotion(self) -> Operation | None:
        """Promote from the lowest rung that no trial has left."""
        while (candidate := self._blocked_rung()) is not None:
            operation = self._promote(*candidate) or self.continue_paused_trial()
            if operation is not None:
                return operation
        return None

    def _select_resumable(self, former: int, candidates: set[int]) -> set[int]:
        """Return all trials: more of a rung are promoted when more arrive; none at the top."""
        if self.top > former:
            return candidates
        return candidates - {rank[2] for rank in self.rungs[self.top]}

    def _promotable(self) -> tuple[int, int] | None:
        """Return the highest rung with a promotable trial, and that trial."""
        for rung in range(self.top - 1, -1, -1):
            # From the top down: a promotion there brings a result sooner. The quota grows with the
            # rung, so a trial that was not good enough may become promotable later without a report
            # of its own.
            best = int(len(self.rungs[rung]) / self.divisor)
            trial_id = self._best_promotable(rung, best)
            if trial_id is not None:
                return rung, trial_id
        return None

    def _blocked_rung(self) -> tuple[int, int] | None:
        """Return a rung that no trial has left, and its best trial that still can."""
        for rung in range(self.top):
            if self._promoted[rung].isdisjoint(rank[2] for rank in self.rungs[rung]):
                trial_id = self._best_promotable(rung, len(self.rungs[rung]))
                if trial_id is not None:
                    return rung, trial_id
        return None

    def _best_promotable(self, rung: int, best: int) -> int | None:
        """Return the first of the ``best`` of a rung that is paused and not promoted yet."""
        went_on = self._promoted[rung]
        for rank in self.rungs[rung][:best]:
            trial_id = rank[2]
            if trial_id not in went_on and trial_id in self.waiting and _is_finite(rank):
                return trial_id
        return None

    def _promote(self, rung: int, trial_id: int) -> Operation | None:
        """Let a trial train to the next rung, or judge it there if it already reached that length.

        Returns:
            The trial's operation; None when it keeps waiting, now at the next rung.
        """
        # With sparse rungs, or after growth, a trial may have trained past the next rung already.
        self.mark_promoted(rung, trial_id)
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
        self._resumable.add(trial_id)
        return Stop(trial_id)


def _is_finite(rank: Rank) -> bool:
    return not rank[0] and math.isfinite(rank[1])


class StoppingRungs(Rungs):
    """Bracket that stops trials outside the best ``1 / divisor`` of their rung.

    The best of a rung so far always continues, so the first trial there does. A trial that skipped
    a rung is judged there by its next report.
    """

    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Compare the trial at every rung that it has reached since its last report."""
        for rung in range(self.due[trial_id], len(self.lengths)):
            self.due[trial_id] = rung
            if length < self.lengths[rung]:
                return Verdict.CONTINUE
            # ASHA does not wait for a rung to fill: a trial is compared with those that arrived
            # before it. Early arrivals are judged against few others and may continue wrongly,
            # which costs less than idle slots. At least one survives, or a search with few trials
            # would never reach the top.
            position = self.insert(rung, rank)
            survivors = max(int(len(self.rungs[rung]) / self.divisor), 1)
            if rung == self.top or position >= survivors:
                return Verdict.STOP
            self.mark_promoted(rung, trial_id)
        raise AssertionError("the highest rung stops everyone")

    def continue_paused_trial(self) -> Operation | None:
        """Continue the best survivor of the former top; only growth makes trials wait here."""
        if not self.waiting:
            return None
        trial_id = min(self.waiting, key=lambda waiting_id: self._last[waiting_id][0])
        self.waiting.discard(trial_id)
        former = max(rung for rung in range(self.top) if self.is_promoted(rung, trial_id))
        self.due[trial_id] = former + 1
        return Continue(trial_id, self.lengths[-1])

    def _select_resumable(self, former: int, candidates: set[int]) -> set[int]:
        """Return the trials of the former top that would have survived an ordinary rung."""
        if self.top == former:
            return set()
        ranked = [rank[2] for rank in self.rungs[former] if rank[2] in candidates]
        survivors = ranked[: max(int(len(self.rungs[former]) / self.divisor), 1)]
        for trial_id in survivors:
            self.mark_promoted(former, trial_id)
        return set(survivors)
