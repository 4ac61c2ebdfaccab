"""Stopping: a trial trains on until it is not among the best of a rung."""

from zerolab.searcher.asha.rungs import Rank, Rungs, Verdict
from zerolab.searcher.operations import Continue, Operation

__all__ = ["StoppingRungs"]


class StoppingRungs(Rungs):
    """A bracket that stops a trial at a rung where it is not within the best ``1 / divisor``.

    At least one survives: the best of a rung so far always goes on, so the first there does.
    A trial that skipped a rung is judged there by what it reports next.
    """

    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Compare it at every rung that it has reached since its last report."""
        for rung in range(self.due[trial_id], len(self.lengths)):
            self.due[trial_id] = rung
            if length < self.lengths[rung]:
                return Verdict.GO_ON
            place = self.insert(rung, rank)
            survivors = max(int(len(self.rungs[rung]) / self.divisor), 1)
            if rung == self.top or place >= survivors:
                return Verdict.STOP
            self.mark_gone_on(rung, trial_id)
        raise AssertionError("the highest rung stops everyone")

    def go_on(self) -> Operation | None:
        """Who survived the former top goes on, the best first; nobody else ever waits."""
        if not self.waiting:
            return None
        trial_id = min(self.waiting, key=lambda each: self._last[each][0])
        self.waiting.discard(trial_id)
        former = max(rung for rung in range(self.top) if self.has_gone_on(rung, trial_id))
        self.due[trial_id] = former + 1
        return Continue(trial_id, self.lengths[-1])

    def _wait_again(self, former: int, able: set[int]) -> set[int]:
        """Of the former top, those that would have survived had it been a rung like the others."""
        if self.top == former:
            return set()
        ranked = [rank[2] for rank in self.rungs[former] if rank[2] in able]
        survivors = ranked[: max(int(len(self.rungs[former]) / self.divisor), 1)]
        for trial_id in survivors:
            self.mark_gone_on(former, trial_id)
        return set(survivors)
