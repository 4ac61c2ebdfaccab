"""The ``searcher`` block of an experiment file: what all searchers share."""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from zerolab.contract.names import metric_name_problem
from zerolab.schema.lengths import Length
from zerolab.schema.section import NonNegativeInt, PositiveInt, Section
from zerolab.schema.space import space_problems
from zerolab.searcher.interface import Searcher
from zerolab.searcher.operations import Operation

__all__ = ["MetricName", "SearcherConfig"]

_MAX_AT_ONCE = 10_000
"""Most trials that exist at a time: the server makes the first ones in one step, within seconds."""


def _uuid(value: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F][0-9a-fA-F-]{3,35}", value):
        msg = f"must be the uuid of a checkpoint, or its first 4 characters or more, got {value!r}"
        raise ValueError(msg)
    return value.lower()


def _metric(value: str) -> str:
    problem = metric_name_problem(value)
    if problem is not None:
        raise ValueError(problem)
    return value


MetricName = Annotated[str, AfterValidator(_metric)]
"""Name of a metric that can be reported."""


class SearcherConfig(Section):
    """Which trials there are, and how far each one trains; one subclass for each searcher."""

    name: str
    """Which searcher."""

    metric: MetricName | None
    """The validation metric by which trials are compared. Optional for ``single``: without it no
    validation is expected."""

    smaller_is_better: bool = True
    """Whether a smaller metric is the better one."""

    max_length: Length | None = None
    """How far each trial trains: ``{batches: n}``, ``{epochs: n}`` or a number of batches.
    Required unless the entrypoint is a command."""

    max_concurrent_trials: Annotated[NonNegativeInt, Field(le=_MAX_AT_ONCE)] = 16
    """How many trials exist at a time; 0 means all."""

    source_trial_id: PositiveInt | None = None
    """Warm start: every trial begins with the weights of the newest checkpoint of this trial, which
    may be any experiment's; its counters, optimizer and schedule begin anew."""

    source_checkpoint_uuid: Annotated[str, AfterValidator(_uuid)] | None = None
    """The same with the weights of this checkpoint; at most one of the two is given."""

    has_one_trial: ClassVar[bool] = False
    """Whether the experiment is as far as its only trial."""

    may_grow: ClassVar[frozenset[str]] = frozenset()
    """Fields that may become greater when an experiment goes on."""

    follows_growth: ClassVar[frozenset[str]] = frozenset()
    """Fields that :meth:`settled` sets for those, and that may be said with them."""

    premise: ClassVar[str | None] = None
    """When so many trials end where :meth:`forecast` says; None when it is certain."""

    is_independent: ClassVar[bool] = False
    """Whether no trial has to do with another, so that any may follow those that there are."""
    continues_ended: ClassVar[bool] = False
    """Whether a trial of which it was told that it has ended may go on all the same: nothing
    follows from what trials report, so that a searcher made with greater fields, and told all
    events so far, wants the same trials, and perhaps more. Others have :meth:`grow`."""

    @property
    def full_length(self) -> Length | None:
        """How far a trial trains at most; None when it decides by itself."""
        return self.max_length

    @property
    def length(self) -> int:
        """How far a trial trains at most, in its unit; 0 when it decides by itself."""
        return self.full_length.count if self.full_length else 0

    @property
    def unit(self) -> Literal["batches", "epochs"] | None:
        """In which all lengths of the search are counted; None when trials have no length."""
        return self.full_length.unit if self.full_length else None

    @property
    def runs_beside(self) -> str | None:
        """``module:Class`` of the model directory that decides in a process of its own."""
        return None

    def validate_at(self) -> tuple[int, ...]:
        """Lengths after which a trial is validated, besides its validation period."""
        return ()

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Say before anything starts how many trials end at which length; none where nobody knows.

        Args:
            space: The experiment's hyperparameters, without mistakes.
        """
        del space
        return {}

    def most_length(self, space: Mapping[str, Any]) -> int | None:
        """Say how far all trials train together at most, in the unit of the search.

        That is what :meth:`forecast` says, where the results have no say in it. Trials that are
        replaced, and what is trained again after a failure, come on top.

        Args:
            space: The experiment's hyperparameters, without mistakes.

        Returns:
            None where nobody knows.
        """
        ends = self.forecast(space)
        return sum(end * trials for end, trials in ends.items()) if ends and self.unit else None

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong between the block and the hyperparameters, a line each.

        Args:
            space: The experiment's hyperparameters.
        """
        yield from space_problems(space)
        if self.source_trial_id is not None and self.source_checkpoint_uuid is not None:
            yield (
                "searcher.source_checkpoint_uuid: must not stand beside source_trial_id = "
                f"{self.source_trial_id}, got {self.source_checkpoint_uuid!r}; remove one of them"
            )

    def begin_problems(self, trials: int) -> Iterator[str]:
        """Say that too many trials would begin at once where their number is not bounded.

        Args:
            trials: How many would.
        """
        if not self.max_concurrent_trials and trials > _MAX_AT_ONCE:
            yield (
                f"searcher.max_concurrent_trials: must be 1 to {_MAX_AT_ONCE:,} for this search, "
                f"got 0, with which {trials:,} trials would begin at once"
            )

    @abstractmethod
    def outline(self, space: Mapping[str, Any]) -> str:
        """Say in a few words which trials there will be, as in ``8 trials``.

        Args:
            space: The experiment's hyperparameters, without mistakes.
        """

    def settled(self, before: Self) -> Self:
        """Fill in what must follow when an experiment goes on that was searched by another section.

        Args:
            before: The section so far.
        """
        del before
        return self

    def growth_problems(self, before: Self) -> Iterator[str]:
        """What keeps a search from going on with this section, a line each.

        Args:
            before: The section so far, of the same searcher.
        """
        old, new = before.full_length, self.full_length
        if old is not None and (new is None or new.unit != old.unit or new.count < old.count):
            got = "nothing" if new is None else f"{new.count} {new.unit}"
            least = f"{old.count} {old.unit}"
            yield f"searcher.{self.length_field}: must be at least {least} as before, got {got}"
        for field in sorted(self.may_grow - {"max_length", "max_time", "length_per_round"}):
            least, got_number = getattr(before, field), getattr(self, field)
            if got_number < least:
                yield f"searcher.{field}: must be at least {least} as before, got {got_number}"

    @property
    def length_field(self) -> str:
        """The field that says the length."""
        return "max_length"

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Let a search that was made with lesser fields go on with these.

        Args:
            searcher: Made by a section of the same kind; changed.
            lost: Trials that have no checkpoint left to go on from.

        Returns:
            What is wanted now: trials whose end is taken back (``Reopen``), others that go on, and
            new ones.
        """
        raise AssertionError(f"{self.name} is made anew, and told all events again")

    @abstractmethod
    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make the searcher.

        Args:
            space: The experiment's hyperparameters, without mistakes.
            seed: The same seed gives the same trials.
        """
