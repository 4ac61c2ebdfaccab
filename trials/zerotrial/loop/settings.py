"""How far a trial trains and when it does what, read from an experiment's configuration."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerolab.contract.spec import FitSpec, LengthSpec, ProfilingSpec
from zerolab.errors import ConfigError
from zerotrial.loop.units import (
    Batch,
    Epoch,
    Period,
    Schedule,
    TrainUnit,
    length_in_batches,
)

__all__ = ["FitSettings"]

Policy = Literal["best", "all", "none"]

_HUNDRED_BATCHES = Batch(100)
_EARLY = (1, 2, 5, 10, 20, 50, 100)
"""Batches after which training metrics are reported before the first period is over."""
_NO_PROFILING = ProfilingSpec()


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What :meth:`zerotrial.Trainer.fit` was asked for, or an experiment's configuration says."""

    max_length: TrainUnit
    until: TrainUnit | None = None
    """Where this run pauses; None when it goes all the way."""
    validate_at: TrainUnit | None = None
    """Points after which to validate besides ``validation_period``."""
    report_period: TrainUnit | None = _HUNDRED_BATCHES
    early_reports: bool = False
    """Report the first batches at increasing intervals too, so that a short run has a curve."""
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: Policy = "best"
    initial_validation: bool = False
    metric: str | None = None
    """Validation metric that tells which checkpoint is best."""
    smaller_is_better: bool = True
    records_per_epoch: int = 0
    """Samples in one epoch where the loader has no length; 0 when unknown."""
    profiling: ProfilingSpec = _NO_PROFILING
    test_mode: bool = False
    """One batch, one validation batch, one checkpoint."""

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in ("best", "all", "none"):
            found = f"must be best, all or none, got {self.checkpoint_policy!r}"
            raise ConfigError("fit", [f"checkpoint_policy: {found}"])

    @classmethod
    def from_spec(cls, fit: FitSpec, *, test_mode: bool = False, **given: Any) -> "FitSettings":
        """Read what the experiment says.

        Args:
            fit: Of the run.
            test_mode: One batch, one validation batch, one checkpoint.
            given: Fields that take the place of the experiment's.

        Raises:
            ConfigError: If nobody says how far to train.
        """
        if test_mode:
            given["max_length"] = Batch(1)
        if "max_length" not in given and fit.max_length is None:
            problem = "searcher.max_length: is missing; set it to {batches: n} or {epochs: n}"
            raise ConfigError("experiment", [problem])
        fields = {
            "max_length": _unit(fit.max_length),
            "until": _in_unit_of(fit.max_length, fit.until),
            "validate_at": _in_unit_of(fit.max_length, fit.validate_at),
            "report_period": Batch(fit.scheduling_unit),
            "early_reports": "report_period" not in given,
            "validation_period": _unit(fit.validation_period),
            "checkpoint_period": _unit(fit.checkpoint_period),
            "checkpoint_policy": fit.checkpoint_policy,
            "initial_validation": fit.initial_validation,
            "metric": fit.metric,
            "smaller_is_better": fit.smaller_is_better,
            "records_per_epoch": fit.records_per_epoch,
            "profiling": fit.profiling,
            "test_mode": test_mode,
        }
        return cls(**fields | given)

    def schedule(self, epoch_length: int | None) -> Schedule:
        """Turn all lengths into batches.

        Args:
            epoch_length: Batches in one epoch; ``None`` when the data has no length.

        Raises:
            ConfigError: If a length is in epochs and the data has no length.
        """
        if self.test_mode:
            return Schedule(max_steps=1, epoch_length=epoch_length)
        validate = Period.of(self.validation_period, epoch_length)
        compared = Period.of(self.validate_at, epoch_length)
        report = Period.of(self.report_period, epoch_length)
        if self.early_reports and report.every is not None:
            early = frozenset(step for step in _EARLY if step < report.every)
            report = replace(report, at=early)
        until = None if self.until is None else length_in_batches(self.until, epoch_length)
        return Schedule(
            until=until,
            max_steps=length_in_batches(self.max_length, epoch_length),
            epoch_length=epoch_length,
            report=report,
            validate=replace(validate, at=validate.at | compared.at),
            checkpoint=Period.of(self.checkpoint_period, epoch_length),
        )

    def improves(self, value: float | None, best: float | None) -> bool:
        """Whether a validation beats the best one so far; NaN and a missing value never do."""
        if value is None or value != value:  # noqa: PLR0124 - NaN alone differs from itself
            return False
        if best is None:
            return True
        return value < best if self.smaller_is_better else value > best


def _unit(length: LengthSpec | None) -> TrainUnit | None:
    if length is None:
        return None
    return Batch(length.count) if length.unit == "batches" else Epoch(length.count)


def _in_unit_of(length: LengthSpec | None, given: int | Collection[int] | None) -> TrainUnit | None:
    if length is None or not given:
        return None
    return Batch(given) if length.unit == "batches" else Epoch(given)
