"""``pbt``: a population that trains in rounds; the worst are replaced by copies of the best.

References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017, section 4: truncation
    selection, and exploring by resampling or perturbing.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from zerolab.schema.lengths import LONGEST, Length
from zerolab.schema.section import PositiveInt, Section
from zerolab.schema.space import MAX_TRIALS, Point, Space
from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import ConcurrentSearcher, trial_rng
from zerolab.searcher.section import SearcherConfig

__all__ = ["PbtConfig", "PbtSearcher"]

_MAX_ROUNDS = 10_000
"""Each run receives the end of every round."""


class ReplaceConfig(Section):
    """Selection of the members that are replaced after a round."""

    truncate_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    """Fraction of the population, the worst, that ends after a round; as many of the best are
    copied."""


class ExploreConfig(Section):
    """Changes to the hyperparameters of a copy."""

    resample_probability: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Probability that a hyperparameter is drawn again from the whole space."""

    perturb_factor: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Otherwise a number grows or shrinks by this fraction, with equal probability."""


class PbtConfig(SearcherConfig):
    """Population-based training."""

    name: Literal["pbt"]
    """A population that trains in rounds; after each, the worst are replaced by changed copies of
    the best."""

    population_size: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """Number of trials that train in a round."""

    num_rounds: Annotated[PositiveInt, Field(le=_MAX_ROUNDS)]
    """Number of rounds."""

    length_per_round: Length | None = None
    """Length of a trial in a round, written as ``max_length``; required unless ``max_length`` is
    set, which is then the length of all rounds together."""

    replace_function: ReplaceConfig = ReplaceConfig()
    """Selection of the members that are replaced after a round."""

    explore_function: ExploreConfig = ExploreConfig()
    """Changes to the hyperparameters of a copy."""

    growable_fields: ClassVar[frozenset[str]] = frozenset({"num_rounds", "max_length"})

    @property
    def length_field(self) -> str:
        """``num_rounds`` where rounds have a length, else ``max_length``."""
        return "max_length" if self.length_per_round is None else "num_rounds"

    def with_derived_fields(self, before: Self) -> Self:
        """Keep the length of a round: a greater length means more rounds."""
        if self.length_per_round is not None or not before.length:
            return self
        round_length = before.length // before.num_rounds
        if self.num_rounds == before.num_rounds and self.length % round_length == 0:
            return self.model_copy(update={"num_rounds": self.length // round_length})
        if self.max_length == before.max_length and before.unit is not None:
            longer = Length.model_validate({before.unit: round_length * self.num_rounds})
            return self.model_copy(update={"max_length": longer})
        return self

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Report a length that changes the length of a round."""
        problems = list(super().growth_problems(before))
        yield from problems
        round_length = before.length // before.num_rounds
        if not problems and self.length != round_length * self.num_rounds:
            yield (
                f"searcher.max_length: must be a multiple of the {round_length} {before.unit} "
                f"that a round has, got {self.length}"
            )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Add rounds."""
        assert isinstance(searcher, PbtSearcher)
        return searcher.grow(self, lost)

    @property
    def full_length(self) -> Length | None:
        """Length of all rounds together."""
        if self.length_per_round is None:
            return self.max_length
        fields: dict[str, Any] = {
            self.length_per_round.unit: self.length_per_round.count * self.num_rounds
        }
        return Length.model_construct(**fields)  # unchecked: `problems` validates it

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report a round length that is missing, set twice or not a whole number."""
        yield from super().problems(space)
        yield from self.initial_trials_problems(self.population_size)
        if self.length_per_round is None and self.max_length is None:
            yield (
                "searcher.length_per_round: is required by the pbt searcher, got nothing; "
                "set the length of a trial in a round"
            )
        elif self.length_per_round is not None and self.max_length is not None:
            yield (
                "searcher.max_length: must not be combined with length_per_round, got both; "
                "remove one of them"
            )
        elif self.length_per_round is not None and not 0 < self.length <= LONGEST:
            yield (
                f"searcher.length_per_round: must be 1 to {LONGEST // self.num_rounds} batches or "
                f"epochs with num_rounds = {self.num_rounds}, got {self.length_per_round.count}"
            )
        elif self.length % self.num_rounds:
            yield (
                f"searcher.max_length: must be a multiple of num_rounds = {self.num_rounds}, "
                f"got {self.length}"
            )

    def validate_at(self) -> tuple[int, ...]:
        """Return the ends of the rounds."""
        round_length = self.length // self.num_rounds
        return tuple(range(round_length, self.length + 1, round_length))

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the population and the rounds."""
        del space
        return f"a population of {self.population_size} trials, {self.num_rounds} rounds"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Estimate the ends, assuming no failures and that the same copies never lose again."""
        del space
        round_length, rounds = self.length // self.num_rounds, self.num_rounds
        copies = _num_replaced(self)
        if rounds == 1:
            return {round_length: self.population_size}
        first = {self.length: self.population_size - copies, round_length: copies * (rounds - 1)}
        return {
            length: n + (copies if length == round_length else 0)
            for length, n in first.items()
            if n
        }

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a searcher over a population."""
        return PbtSearcher(self, Space(space), seed)


def _num_replaced(config: PbtConfig) -> int:
    return int(config.replace_function.truncate_fraction * config.population_size)


class _PendingMember(NamedTuple):
    """Member that starts when a place is free: a trial that continues, or a new one."""

    trial_id: int | None = None
    source: int | None = None


class PbtSearcher(ConcurrentSearcher):
    """Trains a population round by round: a round ends when every member was judged.

    A member that ended early ranks last and is always replaced. A copy starts with the weights that
    its source had at the end of the round.

    Args:
        config: The ``searcher`` block.
        space: Search space.
        seed: Seed of the experiment.
    """

    def __init__(self, config: PbtConfig, space: Space, seed: int) -> None:
        self._config = config
        self._space = space
        self._seed = seed
        self._round_length = config.length // config.num_rounds
        self._concurrent = config.max_concurrent_trials or config.population_size
        self._sign = 1.0 if config.smaller_is_better else -1.0
        self._round = 0
        self._created = 0
        self._replaced = 0
        self._points: dict[int, Point] = {}
        self._sources: dict[int, int] = {}  # copy -> the trial that it began from
        self._first_round: dict[int, int] = {}  # trial id -> round in which it began
        self._pending: list[_PendingMember] = []  # trained later in this round
        self._training: set[int] = set()
        self._stopping: set[int] = set()
        self._values: dict[int, float] = {}  # trial id -> its value in this round
        self._final: dict[int, float] = {}  # values of the last round, once it is over
        self._last: dict[int, float] = {}  # trial id -> its last value, while it trains
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._is_finished = False

    def initial_operations(self) -> list[Operation]:
        """Return the operations of the first round."""
        self._pending = [_PendingMember() for _ in range(self._config.population_size)]
        return self._fill()

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge a member that has reached the end of the round."""
        if trial_id not in self._training:
            return []
        self._last[trial_id] = _rankable(self._sign * metric)
        if length < self._due(trial_id):
            return []
        return [*self._judge(trial_id, self._last[trial_id]), *self._fill()]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Judge a member that ended by itself, by its last report."""
        return self._end(trial_id, self._last.get(trial_id, math.inf))

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Rank a failed member last; replace one with invalid hyperparameters.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        is_invalid = ExitReason(reason) is ExitReason.INVALID_HP
        if is_invalid and trial_id in self._training and self._may_replace():
            self._replaced += 1
            self._training.discard(trial_id)
            self._ended.add(trial_id)
            self._pending.insert(0, _PendingMember(None, self._sources.get(trial_id)))
            return self._fill()
        if self._is_open(trial_id) and trial_id not in self._stopping:
            self._failed.add(trial_id)
            if trial_id in self._values:  # judged already, but its weights may be lost
                self._values[trial_id] = math.inf
        return self._end(trial_id, math.inf)

    def grow(self, config: PbtConfig, lost: Collection[int]) -> list[Operation]:
        """Continue with more rounds.

        Args:
            config: With the new number of rounds; all else is unchanged.
            lost: Trials that have no checkpoint left to resume from.

        Returns:
            Operations that follow: members of the former last round continue, and copies of the
            best replace the worst.
        """
        if config.num_rounds == self._config.num_rounds:
            return []
        was_last = self._round >= self._config.num_rounds - 1
        self._config = config
        self._is_finished = False
        if not was_last:
            return self._fill()
        if self._final:  # the last round was over
            self._round, self._values, self._final = self._round - 1, self._final, {}
        resumable = self._ended & self._values.keys() - self._failed - set(lost)
        resumable = {trial_id for trial_id in resumable if math.isfinite(self._values[trial_id])}
        self._ended -= resumable
        for trial_id in self._ended & self._values.keys():
            self._values[trial_id] = math.inf
        return [*map(Reopen, sorted(resumable)), *self._fill()]

    def progress(self) -> float:
        """Return the share of finished rounds, including the judged part of this one."""
        if self._is_finished:
            return 1.0
        done = self._round + len(self._values) / self._config.population_size
        return min(done / self._config.num_rounds, 1.0)

    def _is_open(self, trial_id: int) -> bool:
        return 1 <= trial_id <= self._created and trial_id not in self._ended

    def _due(self, trial_id: int) -> int:
        """Return the trial's own length at which the round ends."""
        return self._round_length * (self._round - self._first_round[trial_id] + 1)

    def _may_replace(self) -> bool:
        return self._replaced < self._config.population_size

    def _is_last_round(self) -> bool:
        return self._round == self._config.num_rounds - 1

    def _judge(self, trial_id: int, value: float) -> list[Operation]:
        self._values[trial_id] = value
        self._training.discard(trial_id)
        self._last.pop(trial_id, None)
        return self._stop(trial_id) if self._is_last_round() else []

    def _end(self, trial_id: int, value: float) -> list[Operation]:
        if not self._is_open(trial_id):
            return []
        self._ended.add(trial_id)
        self._stopping.discard(trial_id)
        if trial_id in self._training:
            self._judge(trial_id, value)
        member = _PendingMember(trial_id)
        if member in self._pending:  # it ended before it could train in this round
            self._pending.remove(member)
            self._values[trial_id] = math.inf
        return self._fill()

    def _fill(self) -> list[Operation]:
        """Start members up to the limit; when a round is finished, start the next."""
        operations: list[Operation] = []
        while not self._is_finished:
            while self._pending and len(self._training) + len(self._stopping) < self._concurrent:
                operations += self._start(self._pending.pop(0))
            if self._pending or self._training:
                break
            if self._round < self._config.num_rounds:
                operations += self._next_round()
            if self._round == self._config.num_rounds:
                if len(self._ended) == self._created:
                    self._is_finished = True
                    operations.append(Shutdown())
                break
        return operations

    def _start(self, member: _PendingMember) -> list[Operation]:
        if member.trial_id is None:
            return self._create(member.source)
        self._training.add(member.trial_id)
        return [Continue(member.trial_id, self._due(member.trial_id))]

    def _create(self, source: int | None) -> list[Operation]:
        self._created += 1
        trial_id = self._created
        rng = trial_rng(self._seed, trial_id)
        seed = rng.randrange(2**31)
        if source is None:
            point = self._space.point(rng)
        else:
            point = self._explore(self._points[source], rng)
            self._sources[trial_id] = source
        self._points[trial_id] = point
        self._first_round[trial_id] = self._round
        self._training.add(trial_id)
        create = Create(trial_id, self._space.hparams(point), seed, source)
        return [create, Continue(trial_id, self._due(trial_id))]

    def _explore(self, point: Point, rng: Random) -> Point:
        """Resample or perturb each hyperparameter of another trial independently."""
        explore = self._config.explore_function
        moved: list[float | None] = []
        for dimension, at in zip(self._space.dimensions, point, strict=True):
            # A fixed number of draws for each dimension keeps the trial reproducible.
            resampled, coin, drawn = rng.random(), rng.random(), rng.random()
            if at is None or resampled < explore.resample_probability:
                is_choice = dimension.kind == "categorical"
                moved.append(float(int(drawn * dimension.size)) if is_choice else drawn)
            elif dimension.kind == "categorical":
                moved.append(at)
            else:
                factor = 1 + explore.perturb_factor * (1 if coin < 0.5 else -1)
                moved.append(dimension.spec.coordinate(_scaled(dimension.spec.value(at), factor)))
        return self._space.snap(moved)

    def _next_round(self) -> list[Operation]:
        """Rank the members; stop the worst, and queue copies of the best in their places."""
        ranked = sorted(self._values, key=lambda trial_id: (self._values[trial_id], trial_id))
        count = _num_replaced(self._config)
        worst = set(ranked[len(ranked) - count :]) | (self._ended & set(ranked))
        finite = [trial_id for trial_id in ranked if math.isfinite(self._values[trial_id])]
        best = finite[: max(count, 1)]
        values, self._values = self._values, {}
        self._round += 1
        if not best and worst == set(ranked):
            self._round = self._config.num_rounds  # all members failed: no source is left
        if self._round == self._config.num_rounds:
            self._final = values
            return [stop for trial_id in ranked for stop in self._stop(trial_id)]
        sources = [best[index % len(best)] if best else None for index in range(len(worst))]
        # Copies first: each loads its source's checkpoint before the source trains on.
        self._pending = [_PendingMember(None, source) for source in sources]
        self._pending += [_PendingMember(trial_id) for trial_id in ranked if trial_id not in worst]
        losers = (trial_id for trial_id in ranked if trial_id in worst)
        return [stop for trial_id in losers for stop in self._stop(trial_id)]

    def _stop(self, trial_id: int) -> list[Operation]:
        """Request a trial's end, once."""
        if trial_id in self._ended or trial_id in self._stopping:
            return []
        self._stopping.add(trial_id)
        return [Stop(trial_id)]


def _rankable(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _scaled(value: Any, factor: float) -> Any:
    """Multiply a number; an integer is rounded away from its former value."""
    moved = value * factor
    if not isinstance(value, int):
        return moved
    return math.floor(moved) if moved < value else math.ceil(moved)
