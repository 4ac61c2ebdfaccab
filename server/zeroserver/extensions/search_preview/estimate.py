"""Estimate of a search's trials and cost (dry run)."""

from dataclasses import dataclass
from typing import Literal

from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.errors import ConfigError
from zerolab.schema.hyperparameters import space_warnings

__all__ = ["Preview", "estimate_search"]


@dataclass(frozen=True)
class Preview:
    """Estimated trials by length, and their cost.

    Searchers that compare trials can only estimate under a premise, and give a maximum: more trials
    are promoted when later ones are better.
    """

    outline: str
    """Short description of the trials."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; None if trials determine their lengths."""
    lengths: dict[int, int]
    """Length to the number of trials that end there; empty when the searcher cannot estimate it."""
    most_length: int | None
    """Maximum total length over all trials, in the unit of the lengths; None when unknown."""
    slots: int
    """Slots of each trial."""
    seconds_per_unit: float | None = None
    """Seconds that a trial needs for one batch or one epoch; None when unknown."""
    like: int | None = None
    """Experiment whose speed was used; None when the time was given."""
    warnings: tuple[str, ...] = ()
    """Probable mistakes in the search's configuration."""
    premise: str | None = None
    """Assumption under which ``lengths`` holds; None when it is certain or unknown."""

    @property
    def trials(self) -> int | None:
        """Number of trials; None when the searcher cannot estimate it."""
        return sum(self.lengths.values()) if self.lengths else None

    @property
    def total_length(self) -> int | None:
        """Total length over all trials, in the unit of the lengths; None when unknown."""
        if not self.lengths or self.unit is None:
            return None
        return sum(length * number for length, number in self.lengths.items())

    @property
    def slot_hours(self) -> float | None:
        """Slot hours of all trials; None when a time or a length is unknown."""
        return self._hours(self.total_length)

    @property
    def most_slot_hours(self) -> float | None:
        """Slot hours for the maximum total length; None when unknown."""
        return self._hours(self.most_length)

    def _hours(self, length: int | None) -> float | None:
        if length is None or self.seconds_per_unit is None:
            return None
        return length * self.seconds_per_unit * self.slots / 3600


def estimate_search(
    config: ExperimentConfig,
    *,
    seconds_per_batch: float | None = None,
    seconds_per_epoch: float | None = None,
    like: int | None = None,
) -> Preview:
    """Estimate a search's trials and their cost (dry run).

    Args:
        config: The experiment file.
        seconds_per_batch: Duration of one batch of a trial, for a search that counts batches.
        seconds_per_epoch: Duration of one epoch, for a search that counts epochs.
        like: Experiment from which the duration was taken.

    Raises:
        ConfigError: If a time has another unit than the search.
    """
    searcher = config.searcher
    times = {"batches": seconds_per_batch, "epochs": seconds_per_epoch}
    seconds = times.pop(searcher.unit, None) if searcher.unit else None
    if seconds is None and any(times.values()):
        unit = searcher.unit or "nothing: its trials decide how long they train"
        options = {"batches": "seconds_per_batch", "epochs": "seconds_per_epoch"}
        option = next(options[name] for name, value in times.items() if value)
        problem = f"{option}: must be in the unit of the search, which counts in {unit}"
        raise ConfigError("preview", [problem])
    return Preview(
        outline=searcher.outline(config.hyperparameters),
        unit=searcher.unit,
        lengths=searcher.forecast(config.hyperparameters),
        most_length=searcher.most_length(config.hyperparameters),
        slots=config.resources.slots_per_trial,
        seconds_per_unit=seconds,
        like=like,
        premise=searcher.premise,
        warnings=tuple(space_warnings(config.hyperparameters)),
    )
