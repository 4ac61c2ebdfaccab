"""Lengths and periods of training, and the schedule of actions in batches.

Everything here counts *batches* (optimizer steps) from the start of the trial. Reports,
validations, checkpoints and restarts do not reset the count, so the schedule depends on it alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zerolab.errors import ConfigError

__all__ = ["Batch", "Epoch", "Period", "Schedule", "TrainUnit", "length_in_batches", "read_unit"]


@dataclass(frozen=True)
class TrainUnit:
    """Length, period, or exact points in training.

    Args:
        value: Number of units of a length or a period; or a collection of exact points.

    Raises:
        ConfigError: If a number is below 1.

    Example:
        >>> TrainUnit([100, 1000])
        TrainUnit(value=[100, 1000])
    """

    value: int | Collection[int]

    def __post_init__(self) -> None:
        points = [self.value] if isinstance(self.value, int) else list(self.value)
        name = type(self).__name__
        if not all(isinstance(point, int) and point >= 1 for point in points):
            raise ConfigError(name, [f"{name}: must hold whole numbers >= 1, got {self.value!r}"])


@dataclass(frozen=True)
class Batch(TrainUnit):
    """Number of batches; one batch is one optimizer step on all ranks.

    Args:
        value: Number of batches of a length or a period; or a collection of exact batches.

    Raises:
        ConfigError: If a number is below 1.

    Example:
        >>> zerotrial.Batch(1000)
        Batch(value=1000)
    """


@dataclass(frozen=True)
class Epoch(TrainUnit):
    """Number of passes over the training data.

    Args:
        value: Number of epochs of a length or a period; or a collection of exact epochs.

    Raises:
        ConfigError: If a number is below 1.

    Example:
        >>> zerotrial.Epoch(3)
        Epoch(value=3)
    """


def read_unit(key: str, value: Any) -> TrainUnit:
    """Convert a length or a period as users write it.

    Args:
        key: Name of the argument, for messages.
        value: A unit, ``{"batches": n}``, ``{"epochs": n}`` or a number of batches.

    Returns:
        The unit.

    Raises:
        ConfigError: If it is something else.

    Example:
        >>> read_unit("max_length", {"epochs": 3})
        Epoch(value=3)
    """
    if isinstance(value, Batch | Epoch):
        return value
    units = {"batches": Batch, "epochs": Epoch}
    unit, count = "batches", value
    if isinstance(value, Mapping) and len(value) == 1:
        ((unit, count),) = value.items()
    points = [count] if isinstance(count, int) else count
    valid = unit in units and isinstance(points, list | tuple | set | frozenset) and points
    if valid and all(type(point) is int and point >= 1 for point in points):
        return units[unit](count)
    forms = 'must be Batch(n), Epoch(n), {"batches": n}, {"epochs": n} or a number of batches'
    raise ConfigError("fit", [f"{key}: {forms}, at least 1, got {value!r}"])


@dataclass(frozen=True)
class Period:
    """Batches after which an action is due; an empty period is never due.

    Args:
        every: Due at each multiple of this many batches.
        at: Due at exactly these counts.
    """

    every: int | None = None
    at: frozenset[int] = frozenset()

    @classmethod
    def from_unit(cls, unit: TrainUnit | None, epoch_length: int | None) -> "Period":
        """Convert a unit to batches.

        Args:
            unit: ``None`` for never.
            epoch_length: Batches in one epoch; ``None`` if the data has no length.

        Raises:
            ConfigError: If the unit is epochs and the data has no length.
        """
        if unit is None:
            return cls()
        factor = _batches_per_unit(unit, epoch_length)
        if isinstance(unit.value, int):
            return cls(every=unit.value * factor)
        return cls(at=frozenset(point * factor for point in unit.value))

    def due(self, steps: int) -> bool:
        """Return whether it is due after ``steps`` batches; nothing is due at 0."""
        if steps <= 0:
            return False
        return steps in self.at or (self.every is not None and steps % self.every == 0)

    def next_after(self, steps: int) -> int | None:
        """Return the first count beyond ``steps`` at which it is due; ``None`` if there is none."""
        regular = (steps // self.every + 1) * self.every if self.every is not None else None
        if not self.at:
            return regular
        later = [point for point in self.at if point > steps]
        return min(later if regular is None else [regular, *later], default=None)


@dataclass(frozen=True)
class Schedule:
    """Schedule of a trial's reports, validations and checkpoints.

    Args:
        max_steps: Total number of batches to train.
        epoch_length: Batches in one epoch; ``None`` if the data has no length.
        report: Period of reports of averaged training metrics.
        validate: Period of validations; one more runs at the end of training.
        checkpoint: Period of checkpoints; one more is saved at the end of training.
        until: Batch after which this run pauses; ``None`` to train to ``max_steps``.
    """

    max_steps: int
    epoch_length: int | None
    report: Period = Period()
    validate: Period = Period()
    checkpoint: Period = Period()
    until: int | None = None

    @property
    def end(self) -> int:
        """Batch after which this run ends."""
        return self.max_steps if self.until is None else min(self.until, self.max_steps)

    @property
    def pauses(self) -> bool:
        """Whether the trial continues in a later run."""
        return self.end < self.max_steps

    def next_stop(self, steps: int) -> int:
        """Return the first count beyond ``steps`` at which an action is due."""
        stop, report = self.next_pause(steps), self.report.next_after(steps)
        return stop if report is None else min(stop, report)

    def next_pause(self, steps: int) -> int:
        """Return the first count beyond ``steps`` at which more than a report is due."""
        stop = self.end
        if self.epoch_length:
            stop = min(stop, (steps // self.epoch_length + 1) * self.epoch_length)
        for period in (self.validate, self.checkpoint):
            upcoming = period.next_after(steps)
            if upcoming is not None and upcoming < stop:
                stop = upcoming
        return stop

    def finished(self, steps: int) -> bool:
        """Return whether this run has trained to its end."""
        return steps >= self.end

    def report_due(self, steps: int) -> bool:
        """Return whether training metrics are reported after ``steps`` batches."""
        return steps > 0 and (self.report.due(steps) or self.finished(steps))

    def validation_due(self, steps: int) -> bool:
        """Return whether the model is validated after ``steps`` batches."""
        return steps > 0 and (self.validate.due(steps) or self.finished(steps))

    def checkpoint_due(self, steps: int) -> bool:
        """Return whether a checkpoint is saved after ``steps`` batches under any policy."""
        return steps > 0 and (self.checkpoint.due(steps) or self.finished(steps))

    def epoch(self, steps: int) -> int:
        """Return the index of the epoch of batch ``steps``, counted from 0."""
        return steps // self.epoch_length if self.epoch_length else 0

    def epoch_ends(self, steps: int) -> bool:
        """Return whether an epoch ends after ``steps`` batches."""
        return bool(self.epoch_length) and steps > 0 and steps % (self.epoch_length or 1) == 0


def length_in_batches(unit: TrainUnit, epoch_length: int | None) -> int:
    """Convert a length to batches.

    Raises:
        ConfigError: If the length is not one number, or is in epochs and the data has no length.
    """
    if not isinstance(unit.value, int):
        raise ConfigError("max_length", [f"must be one number, got {unit!r}"])
    return unit.value * _batches_per_unit(unit, epoch_length)


def _batches_per_unit(unit: TrainUnit, epoch_length: int | None) -> int:
    if not isinstance(unit, Epoch):
        return 1
    if not epoch_length:
        remedy = "give it in batches, set records_per_epoch, or give the training loader a len()"
        raise ConfigError("lengths", [f"{unit!r}: the training data has no length; {remedy}"])
    return epoch_length
