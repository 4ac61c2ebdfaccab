"""Stopping rungs: a trial trains on until it is not among the best of a rung."""

from zerolab.searcher.asha.rungs import Rank, Rungs, Verdict
from zerolab.searcher.operations import Continue, Operation

__all__ = ["StoppingRungs"]


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
