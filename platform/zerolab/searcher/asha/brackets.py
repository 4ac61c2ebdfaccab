"""Searcher that runs several brackets in parallel."""

from collections.abc import Collection, Sequence

from zerolab.schema.space import Space
from zerolab.searcher.asha.rungs import Rungs, Verdict, make_rank
from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import ConcurrentSearcher, trial_rng
from zerolab.searcher.view import SearchView

__all__ = ["MultiBracketSearcher"]


class MultiBracketSearcher(ConcurrentSearcher):
    """Keeps trials of several brackets training, up to a limit.

    When a trial ends or pauses, the first bracket with free capacity continues a paused trial, or
    creates a new one.

    Args:
        brackets: In the order in which they get their trials.
        space: Search space.
        seed: Seed of the experiment.
        concurrent: Maximum number of trials that train at a time over all brackets; 0 means as many
            as the brackets allow.
        smaller_is_better: Whether a smaller metric is better.
    """

    def __init__(
        self,
        brackets: Sequence[Rungs],
        space: Space,
        seed: int,
        concurrent: int,
        *,
        smaller_is_better: bool,
    ) -> None:
        self._brackets = brackets
        self._space = space
        self._seed = seed
        self._concurrent = concurrent or sum(bracket.concurrent for bracket in brackets)
        self._sign = 1.0 if smaller_is_better else -1.0
        self._bracket_of: dict[int, Rungs] = {}  # trial id -> its bracket
        self._is_finished = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge the trial at the rungs that it has reached."""
        bracket = self._bracket_of.get(trial_id)
        if bracket is None:
            return []
        verdict = bracket.report(trial_id, make_rank(self._sign * metric, trial_id), length)
        if verdict is Verdict.CONTINUE:
            return []
        stop: list[Operation] = [Stop(trial_id)] if verdict is Verdict.STOP else []
        return stop + self._fill()

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Free the trial's place for the next one."""
        return self._close(trial_id, None)

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Rank the trial last, or remove it if its hyperparameters were invalid.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._close(trial_id, ExitReason(reason))

    def grow(
        self, trials: int, rungs: Sequence[tuple[Sequence[int], int]], lost: Collection[int]
    ) -> list[Operation]:
        """Continue with more trials, or longer ones.

        Args:
            trials: Number over all brackets; additional trials are shared in proportion to the
                brackets' sizes.
            rungs: For each bracket the lengths of its rungs, and its maximum number of concurrent
                trials.
            lost: Trials that have no checkpoint left to resume from.
        """
        self._is_finished = False
        now = [bracket.trials for bracket in self._brackets]
        extra = max(trials - sum(now), 0)
        # Rounded down; the first bracket, which stops earliest, gets the remainder.
        shares = [extra * trials_now // sum(now) for trials_now in now]
        shares[0] += extra - sum(shares)
        operations: list[Operation] = []
        for bracket, share, (lengths, concurrent) in zip(
            self._brackets, shares, rungs, strict=True
        ):
            reopened = bracket.grow(lengths, bracket.trials + share, concurrent, lost)
            operations += map(Reopen, reopened)
        return operations + self._fill()

    def progress(self) -> float:
        """Return the mean progress of the brackets, from 0 to 1."""
        if self._is_finished:
            return 1.0
        return sum(bracket.progress() for bracket in self._brackets) / len(self._brackets)

    def view(self) -> SearchView:
        """Return the state of all trials."""
        return SearchView(tuple(bracket.view(self._sign) for bracket in self._brackets))

    def _close(self, trial_id: int, reason: ExitReason | None) -> list[Operation]:
        bracket = self._bracket_of.get(trial_id)
        if bracket is None or trial_id in bracket.closed:
            return []
        is_invalid = reason is ExitReason.INVALID_HP
        bracket.close(trial_id, failed=reason is not None, invalid=is_invalid)
        return self._fill()

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        while not self._is_finished:
            next_operations = next(filter(None, map(self._next_operations, self._brackets)), None)
            if next_operations is None:
                break
            operations += next_operations
        if not self._is_finished and all(bracket.is_finished for bracket in self._brackets):
            self._is_finished = True
            operations.append(Shutdown())
        return operations

    def _next_operations(self, bracket: Rungs) -> list[Operation]:
        """Return a bracket's next operations; empty when it is full or has nothing to do."""
        busy = sum(other.busy for other in self._brackets)
        if bracket.busy >= bracket.concurrent or busy >= self._concurrent:
            return []
        # Promotions before new trials: a promising trial gets to the top while others start.
        operation = bracket.continue_paused_trial()
        if operation is not None:
            return [operation]
        if bracket.may_create:
            return self._create(bracket)
        # A training trial may still enter a rung and change who is promoted. Only when none is left
        # must a rung with fewer trials than planned be decided.
        if bracket.busy:
            return []
        operation = bracket.force_promotion()
        return [operation] if operation is not None else list(bracket.stop_paused_trials())

    def _create(self, bracket: Rungs) -> list[Operation]:
        trial_id = len(self._bracket_of) + 1
        self._bracket_of[trial_id] = bracket
        rng = trial_rng(self._seed, trial_id)
        hparams = self._space.sample(rng)
        operations: list[Operation] = [Create(trial_id, hparams, rng.randrange(2**31))]
        until = bracket.add_trial(trial_id)
        if until is not None:
            operations.append(Continue(trial_id, until))
        return operations
