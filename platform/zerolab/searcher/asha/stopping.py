"""Stopping: a trial trains on until it is not among the best of a rung."""

from zerolab.searcher.asha.rungs import Rank, Rungs, Verdict

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
