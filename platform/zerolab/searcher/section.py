"""Base of the ``searcher`` block of an experiment file."""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from zerolab.contract.names import metric_name_problem
from zerolab.schema.lengths import Length, PositiveLength
from zerolab.schema.section import NonNegativeInt, PositiveInt, Section
from zerolab.schema.space import space_problems
from zerolab.searcher.interface import Searcher
from zerolab.searcher.operations import Operation

__all__ = ["MetricName", "SearcherConfig"]

_MAX_INITIAL_TRIALS = 10_000
"""Maximum number of trials at a time: the server creates the first ones in one step, within
seconds."""


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
    """Configuration of a search; one subclass for each searcher.

    Its fields are the keys of the ``searcher`` block.

    Example:
        >>> from typing import Literal
        >>> from zerolab.searcher import make_searcher
        >>> from zerolab.searcher.section import SearcherConfig
        >>> class OnceConfig(SearcherConfig):
        ...     name: Literal["once"]
        ...     def outline(self, space):
        ...         return "1 trial"
        ...     def make(self, space, seed):
        ...         return make_searcher({"name": "single", "metric": self.metric}, space, seed)
        >>> section = OnceConfig(name="once", metric="loss")
        >>> section.make({"lr": 0.1}, seed=1).initial_operations()[0].hparams
        {'lr': 0.1}
    """

    name: str
    """Name of the searcher."""

    metric: MetricName | None
    """The validation metric by which trials are compared. Optional for ``single``: without it no
    validation is expected."""

    smaller_is_better: bool = True
    """Whether a smaller metric is better."""

    max_length: PositiveLength = None
    """Length of each trial: ``{batches: n}``, ``{epochs: n}`` or a number of batches. Required
    unless the entrypoint is a command."""

    max_concurrent_trials: Annotated[NonNegativeInt, Field(le=_MAX_INITIAL_TRIALS)] = 16
    """Maximum number of trials that train at a time; 0 means all."""

    source_trial_id: PositiveInt | None = None
    """Warm start: every trial begins with the weights of this trial's newest checkpoint. The trial
    may belong to any experiment. Counters, optimizer and schedule are not loaded."""

    source_checkpoint_uuid: Annotated[str, AfterValidator(_uuid)] | None = None
    """Warm start from the weights of this checkpoint. Excludes ``source_trial_id``."""

    has_one_trial: ClassVar[bool] = False
    """Whether the experiment's progress is that of its only trial."""

    growable_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that may increase when an experiment is continued."""

    derived_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that :meth:`with_derived_fields` sets from those; a user may set them, too."""

    premise: ClassVar[str | None] = None
    """Assumption under which :meth:`forecast` holds; None when it is certain."""

    has_independent_trials: ClassVar[bool] = False
    """Whether no trial depends on another, so that any trial may follow the existing ones."""
    has_slow_replay: ClassVar[bool] = False
    """Whether a replay of a hundred trials may take seconds. The server then replays a running
    search before it accepts requests."""

    rebuilds_on_growth: ClassVar[bool] = False
    """Whether a grown search is rebuilt and replayed instead of calling :meth:`grow`. It requires
    that reports change no decision: a searcher with larger fields and all events so far requests
    the same trials, and perhaps more. Ended trials may then continue."""

    @property
    def full_length(self) -> Length | None:
        """Maximum length of a trial; None when the trial decides by itself."""
        return self.max_length

    @property
    def length(self) -> int:
        """Maximum length of a trial, in its unit.

        0 when the trial decides by itself.
        """
        return self.full_length.count if self.full_length else 0

    @property
    def unit(self) -> Literal["batches", "epochs"] | None:
        """Unit of all lengths of the search.

        None when trials have no length.
        """
        return self.full_length.unit if self.full_length else None

    @property
    def external_entrypoint(self) -> str | None:
        """``module:Class`` of a searcher in a separate process.

        The process runs in the model directory. None for other searchers.
        """
        return None

    def validate_at(self) -> tuple[int, ...]:
        """Return the lengths of validations that are added to the validation period.

        Returns:
            Lengths in the unit of the search; empty by default.
        """
        return ()

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Estimate how many trials end at which length.

        Args:
            space: The experiment's hyperparameters, already validated.

        Returns:
            Length to number of trials; empty when unknown.
        """
        del space
        return {}

    def most_length(self, space: Mapping[str, Any]) -> int | None:
        """Return the maximum total length over all trials.

        This follows from :meth:`forecast` where results change no decision. Replaced trials, and
        training repeated after a failure, are not included.

        Args:
            space: The experiment's hyperparameters, already validated.

        Returns:
            Length in the unit of the search; None when it is unknown.
        """
        ends = self.forecast(space)
        return sum(end * trials for end, trials in ends.items()) if ends and self.unit else None

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Yield a message for each conflict between the block and the hyperparameters.

        Args:
            space: The experiment's hyperparameters.

        Yields:
            Messages such as ``searcher.max_trials: must be ...``.
        """
        yield from space_problems(space)
        if self.source_trial_id is not None and self.source_checkpoint_uuid is not None:
            yield (
                "searcher.source_checkpoint_uuid: must not be combined with source_trial_id = "
                f"{self.source_trial_id}, got {self.source_checkpoint_uuid!r}; remove one of them"
            )

    def initial_trials_problems(self, trials: int) -> Iterator[str]:
        """Yield a message when too many trials would start at once.

        Args:
            trials: Number of trials that would start at once.

        Yields:
            At most one message.
        """
        if not self.max_concurrent_trials and trials > _MAX_INITIAL_TRIALS:
            yield (
                f"searcher.max_concurrent_trials: must be 1 to {_MAX_INITIAL_TRIALS:,} for this "
                f"search, got 0, with which {trials:,} trials would start at once"
            )

    @abstractmethod
    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the trials in a few words, such as ``8 trials``.

        Args:
            space: The experiment's hyperparameters, already validated.

        Returns:
            The text, for ``zerolab config check``.
        """

    def with_derived_fields(self, before: Self) -> Self:
        """Return this section with fields derived from the section that it continues.

        Args:
            before: The section so far.

        Returns:
            This section or a changed copy.
        """
        del before
        return self

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Yield a message for each conflict with the search to continue.

        Args:
            before: The section so far, of the same searcher.

        Yields:
            Messages such as ``searcher.max_trials: must be at least 8 as before, got 4``.
        """
        old, new = before.full_length, self.full_length
        if old is not None and (new is None or new.unit != old.unit or new.count < old.count):
            got = "nothing" if new is None else f"{new.count} {new.unit}"
            least = f"{old.count} {old.unit}"
            yield f"searcher.{self.length_field}: must be at least {least} as before, got {got}"
        for field in sorted(self.growable_fields - {"max_length", "max_time", "length_per_round"}):
            least, got_number = getattr(before, field), getattr(self, field)
            if got_number < least:
                yield f"searcher.{field}: must be at least {least} as before, got {got_number}"

    @property
    def length_field(self) -> str:
        """Name of the field that sets the length."""
        return "max_length"

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Continue a search that was made with smaller fields.

        Args:
            searcher: Made by a section of the same kind; changed in place.
            lost: Trials that have no checkpoint left to resume from.

        Returns:
            Operations that follow: reopened trials (``Reopen``), continued ones and new ones.

        Raises:
            AssertionError: If ``rebuilds_on_growth`` is set; it is never called then.
        """
        raise AssertionError(f"{self.name} is rebuilt, and all events are replayed")

    @abstractmethod
    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make the searcher of this section.

        Args:
            space: The experiment's hyperparameters, already validated.
            seed: The same seed gives the same trials.

        Returns:
            A searcher without trials.
        """
