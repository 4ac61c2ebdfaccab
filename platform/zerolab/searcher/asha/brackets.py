"""Brackets beside one another as one searcher."""

from collections.abc import Collection, Sequence

from zerolab.schema.space import Space
from zerolab.searcher.asha.rungs import Rungs, Verdict, rank_of
from zerolab.searcher.concurrency import FillingSearcher
from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import trial_rng
from zerolab.searcher.view import SearchView

__all__ = ["Tournament"]


class Tournament(FillingSearcher):
    """Keeps so many trials of several brackets training.

    A trial that ends or pauses makes room: in the first bracket that has room and something to do,
    somebody goes on, else a new trial begins.

    Args:
        brackets: In the order in which they get their trials.
        space: What trials may be.
        seed: Of the experiment.
        concurrent: How many trials train at a time over all brackets; 0 means as many as each
            bracket allows.
        smaller_is_better: Whether a smaller metric is the better one.
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
        self._of: dict[int, Rungs] = {}  # trial id -> its bracket
        self._over = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge the trial at the rungs that it has reached."""
        bracket = self._of.get(trial_id)
        if bracket is None:
            return []
        verdict = bracket.report(trial_id, rank_of(self._sign * metric, trial_id), length)
        if verdict is Verdict.GO_ON:
            return []
        stop: list[Operation] = [Stop(trial_id)] if verdict is Verdict.STOP else []
        return stop + self._fill()

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Make room for the next one."""
        return self._close(trial_id, None)

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Rank the trial last, or forget it if it was impossible; make room for the next one.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._close(trial_id, ExitReason(reason))

    def grow(
        self, trials: int, rungs: Sequence[tuple[Sequence[int], int]], lost: Collection[int]
    ) -> list[Operation]:
        """Go on with more trials, or longer ones.

        Args:
            trials: How many there are over all brackets; those that are more than before are
                shared as the brackets' own are.
            rungs: For each bracket the lengths of its rungs, and how many of its trials train at a
                time.
            lost: Trials that have no checkpoint left to go on from.
        """
        self._over = False
        now = [bracket.trials for bracket in self._brackets]
        more = max(trials - sum(now), 0)
        shares = [more * each // sum(now) for each in now]
        shares[0] += more - sum(shares)
        operations: list[Operation] = []
        for bracket, share, (lengths, concurrent) in zip(
            self._brackets, shares, rungs, strict=True
        ):
            again = bracket.grow(lengths, bracket.trials + share, concurrent, lost)
            operations += map(Reopen, again)
        return operations + self._fill()

    def progress(self) -> float:
        """Mean of the brackets, from 0 to 1."""
        if self._over:
            return 1.0
        return sum(bracket.progress() for bracket in self._brackets) / len(self._brackets)

    def view(self) -> SearchView:
        """Where the trials stand."""
        return SearchView(tuple(bracket.view(self._sign) for bracket in self._brackets))

    def _close(self, trial_id: int, reason: ExitReason | None) -> list[Operation]:
        bracket = self._of.get(trial_id)
        if bracket is None or trial_id in bracket.closed:
            return []
        is_invalid = reason is ExitReason.INVALID_HP
        bracket.close(trial_id, failed=reason is not None, invalid=is_invalid)
        return self._fill()

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        while not self._over:
            wanted = next(filter(None, map(self._next, self._brackets)), None)
            if wanted is None:
                break
            operations += wanted
        if not self._over and all(bracket.is_over for bracket in self._brackets):
            self._over = True
            operations.append(Shutdown())
        return operations

    def _next(self, bracket: Rungs) -> list[Operation]:
        """What a bracket wants next; nothing when it has no room, or nothing to do."""
        busy = sum(each.busy for each in self._brackets)
        if bracket.busy >= bracket.concurrent or busy >= self._concurrent:
            return []
        operation = bracket.go_on()
        if operation is not None:
            return [operation]
        if bracket.may_create:
            return self._create(bracket)
        if bracket.busy:
            return []
        operation = bracket.last_chance()
        return [operation] if operation is not None else list(bracket.finish())

    def _create(self, bracket: Rungs) -> list[Operation]:
        trial_id = len(self._of) + 1
        self._of[trial_id] = bracket
        rng = trial_rng(self._seed, trial_id)
        hparams = self._space.sample(rng)
        operations: list[Operation] = [Create(trial_id, hparams, rng.randrange(2**31))]
        until = bracket.admit(trial_id)
        if until is not None:
            operations.append(Continue(trial_id, until))
        return operations
