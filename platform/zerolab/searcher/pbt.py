"""``pbt``: a population that trains in rounds; after each the worst begin anew from the best.

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
from zerolab.searcher.concurrency import FillingSearcher
from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import trial_rng
from zerolab.searcher.section import SearcherConfig

__all__ = ["PbtConfig", "PbtSearcher"]

_MAX_ROUNDS = 10_000
"""Each run is told the end of every round."""


class ReplaceConfig(Section):
    """Who is replaced after a round."""

    truncate_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    """Part of the population that ends after a round, the worst; as many of the best get a copy."""


class ExploreConfig(Section):
    """How the hyperparameters of a copy differ."""

    resample_probability: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How probable it is that a hyperparameter is drawn anew from the whole space."""

    perturb_factor: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Else a number is made larger or smaller by this part of it, as a coin falls."""


class PbtConfig(SearcherConfig):
    """A population that learns from itself."""

    name: Literal["pbt"]
    """A population that trains in rounds; after each, the worst are replaced by changed copies of
    the best."""

    population_size: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """How many trials train in a round."""

    num_rounds: Annotated[PositiveInt, Field(le=_MAX_ROUNDS)]
    """How many rounds there are."""

    length_per_round: Length | None = None
    """How far a trial trains in a round, written as ``max_length``; required unless ``max_length``
    is given, which is then the length of all rounds together."""

    replace_function: ReplaceConfig = ReplaceConfig()
    """Who is replaced after a round."""

    explore_function: ExploreConfig = ExploreConfig()
    """How the hyperparameters of a copy differ."""

    may_grow: ClassVar[frozenset[str]] = frozenset({"num_rounds", "max_length"})

    @property
    def length_field(self) -> str:
        """Where rounds have a length, their number says it."""
        return "max_length" if self.length_per_round is None else "num_rounds"

    def settled(self, before: Self) -> Self:
        """Rounds stay as long as they are: a greater length means more of them."""
        if self.length_per_round is not None or not before.length:
            return self
        each = before.length // before.num_rounds
        if self.num_rounds == before.num_rounds and self.length % each == 0:
            return self.model_copy(update={"num_rounds": self.length // each})
        if self.max_length == before.max_length and before.unit is not None:
            longer = Length.model_validate({before.unit: each * self.num_rounds})
            return self.model_copy(update={"max_length": longer})
        return self

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Members are compared after rounds of one length."""
        told = list(super().growth_problems(before))
        yield from told
        each = before.length // before.num_rounds
        if not told and self.length != each * self.num_rounds:
            yield (
                f"searcher.max_length: must be a multiple of the {each} {before.unit} that a round "
                f"has, got {self.length}"
            )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """More rounds."""
        assert isinstance(searcher, PbtSearcher)
        return searcher.grow(self, lost)

    @property
    def full_length(self) -> Length | None:
        """Of all rounds together."""
        if self.length_per_round is None:
            return self.max_length
        whole: dict[str, Any] = {
            self.length_per_round.unit: self.length_per_round.count * self.num_rounds
        }
        return Length.model_construct(**whole)  # unchecked: `problems` says what is wrong with it

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """The length of a round must be said, once, and be a whole one."""
        yield from super().problems(space)
        yield from self.begin_problems(self.population_size)
        if self.length_per_round is None and self.max_length is None:
            yield (
                "searcher.length_per_round: is required by the pbt searcher, got nothing; "
                "say how far a trial trains in a round"
            )
        elif self.length_per_round is not None and self.max_length is not None:
            yield (
                "searcher.max_length: must not stand beside length_per_round, got both; "
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
        """At the end of each round."""
        each = self.length // self.num_rounds
        return tuple(range(each, self.length + 1, each))

    def outline(self, space: Mapping[str, Any]) -> str:
        """How many, how often."""
        del space
        return f"a population of {self.population_size} trials, {self.num_rounds} rounds"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """What the arithmetic says when nobody fails and the same copies never lose again."""
        del space
        each, rounds = self.length // self.num_rounds, self.num_rounds
        copies = _truncated(self)
        if rounds == 1:
            return {each: self.population_size}
        first = {self.length: self.population_size - copies, each: copies * (rounds - 1)}
        return {length: n + (copies if length == each else 0) for length, n in first.items() if n}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A population."""
        return PbtSearcher(self, Space(space), seed)


def _truncated(config: PbtConfig) -> int:
    return int(config.replace_function.truncate_fraction * config.population_size)


class _Turn(NamedTuple):
    """What begins when there is room: a trial that goes on, or a new one."""

    trial_id: int | None = None
    source: int | None = None


class PbtSearcher(FillingSearcher):
    """Keeps a population in step: a round ends when every member has been judged.

    A member that ended early ranks last and is always replaced; a copy begins with the weights
    that its source had at the end of the round.

    Args:
        config: The ``searcher`` block.
        space: What is searched.
        seed: Of the experiment.
    """

    def __init__(self, config: PbtConfig, space: Space, seed: int) -> None:
        self._config = config
        self._space = space
        self._seed = seed
        self._each = config.length // config.num_rounds
        self._concurrent = config.max_concurrent_trials or config.population_size
        self._sign = 1.0 if config.smaller_is_better else -1.0
        self._round = 0
        self._created = 0
        self._replaced = 0
        self._points: dict[int, Point] = {}
        self._sources: dict[int, int] = {}  # copy -> the trial that it began from
        self._born: dict[int, int] = {}  # trial id -> round in which it began
        self._waiting: list[_Turn] = []  # who trains later in this round
        self._training: set[int] = set()
        self._stopping: set[int] = set()
        self._values: dict[int, float] = {}  # trial id -> its value in this round
        self._final: dict[int, float] = {}  # the same of the last round, when it is over
        self._last: dict[int, float] = {}  # trial id -> what it reported last, while it trains
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._over = False

    def initial_operations(self) -> list[Operation]:
        """The first round."""
        self._waiting = [_Turn() for _ in range(self._config.population_size)]
        return self._fill()

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge a member that has come to the end of the round."""
        if trial_id not in self._training:
            return []
        self._last[trial_id] = _rankable(self._sign * metric)
        if length < self._due(trial_id):
            return []
        return [*self._judge(trial_id, self._last[trial_id]), *self._fill()]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """A member that ended by itself is judged by what it reported last."""
        return self._end(trial_id, self._last.get(trial_id, math.inf))

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """A member that failed ranks last; one with impossible hyperparameters begins anew.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        is_invalid = ExitReason(reason) is ExitReason.INVALID_HP
        if is_invalid and trial_id in self._training and self._may_replace():
            self._replaced += 1
            self._training.discard(trial_id)
            self._ended.add(trial_id)
            self._waiting.insert(0, _Turn(None, self._sources.get(trial_id)))
            return self._fill()
        if self._is_open(trial_id) and trial_id not in self._stopping:
            self._failed.add(trial_id)
            if trial_id in self._values:  # judged already; it may be that its weights are gone
                self._values[trial_id] = math.inf
        return self._end(trial_id, math.inf)

    def grow(self, config: PbtConfig, lost: Collection[int]) -> list[Operation]:
        """Go on with more rounds.

        Args:
            config: With the number of rounds; all else is as it was.
            lost: Trials that have no checkpoint left to go on from.

        Returns:
            What is wanted now: the members of what was the last round go on, and copies of the best
            take the places of the worst.
        """
        if config.num_rounds == self._config.num_rounds:
            return []
        was_last = self._round >= self._config.num_rounds - 1
        self._config = config
        self._over = False
        if not was_last:
            return self._fill()
        if self._final:  # the last round was over
            self._round, self._values, self._final = self._round - 1, self._final, {}
        able = self._ended & self._values.keys() - self._failed - set(lost)
        able = {trial_id for trial_id in able if math.isfinite(self._values[trial_id])}
        self._ended -= able
        for trial_id in self._ended & self._values.keys():
            self._values[trial_id] = math.inf
        return [*map(Reopen, sorted(able)), *self._fill()]

    def progress(self) -> float:
        """Rounds that are done, and how many of the population have done this one."""
        if self._over:
            return 1.0
        done = self._round + len(self._values) / self._config.population_size
        return min(done / self._config.num_rounds, 1.0)

    def _is_open(self, trial_id: int) -> bool:
        return 1 <= trial_id <= self._created and trial_id not in self._ended

    def _due(self, trial_id: int) -> int:
        """Where the round ends for a trial, counted from its own beginning."""
        return self._each * (self._round - self._born[trial_id] + 1)

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
        turn = _Turn(trial_id)
        if turn in self._waiting:  # its turn never comes
            self._waiting.remove(turn)
            self._values[trial_id] = math.inf
        return self._fill()

    def _fill(self) -> list[Operation]:
        """Let as many train as may; when a round is done, begin the next."""
        operations: list[Operation] = []
        while not self._over:
            while self._waiting and len(self._training) + len(self._stopping) < self._concurrent:
                operations += self._begin(self._waiting.pop(0))
            if self._waiting or self._training:
                break
            if self._round < self._config.num_rounds:
                operations += self._next_round()
            if self._round == self._config.num_rounds:
                if len(self._ended) == self._created:
                    self._over = True
                    operations.append(Shutdown())
                break
        return operations

    def _begin(self, turn: _Turn) -> list[Operation]:
        if turn.trial_id is None:
            return self._create(turn.source)
        self._training.add(turn.trial_id)
        return [Continue(turn.trial_id, self._due(turn.trial_id))]

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
        self._born[trial_id] = self._round
        self._training.add(trial_id)
        create = Create(trial_id, self._space.hparams(point), seed, source)
        return [create, Continue(trial_id, self._due(trial_id))]

    def _explore(self, point: Point, rng: Random) -> Point:
        """Hyperparameters near those of another trial, or drawn anew, each for itself."""
        explore = self._config.explore_function
        moved: list[float | None] = []
        for dimension, at in zip(self._space.dimensions, point, strict=True):
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
        """Rank the members; the worst end, and copies of the best take their places."""
        ranked = sorted(self._values, key=lambda trial_id: (self._values[trial_id], trial_id))
        count = _truncated(self._config)
        worst = set(ranked[len(ranked) - count :]) | (self._ended & set(ranked))
        finite = [trial_id for trial_id in ranked if math.isfinite(self._values[trial_id])]
        best = finite[: max(count, 1)]
        values, self._values = self._values, {}
        self._round += 1
        if not best and worst == set(ranked):
            self._round = self._config.num_rounds  # all have failed: nobody is left to learn from
        if self._round == self._config.num_rounds:
            self._final = values
            return [stop for trial_id in ranked for stop in self._stop(trial_id)]
        places = range(len(worst))
        sources = [best[place % len(best)] if best else None for place in places]
        # Copies first: each begins with what its source has at the end of this round.
        self._waiting = [_Turn(None, source) for source in sources]
        self._waiting += [_Turn(trial_id) for trial_id in ranked if trial_id not in worst]
        losers = (trial_id for trial_id in ranked if trial_id in worst)
        return [stop for trial_id in losers for stop in self._stop(trial_id)]

    def _stop(self, trial_id: int) -> list[Operation]:
        """Ask for a trial's end, once."""
        if trial_id in self._ended or trial_id in self._stopping:
            return []
        self._stopping.add(trial_id)
        return [Stop(trial_id)]


def _rankable(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _scaled(value: Any, factor: float) -> Any:
    """A number times a factor; a whole one is rounded away from what it was."""
    moved = value * factor
    if not isinstance(value, int):
        return moved
    return math.floor(moved) if moved < value else math.ceil(moved)
