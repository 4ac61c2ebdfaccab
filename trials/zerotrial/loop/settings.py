"""Settings of the training loop, read from an experiment's configuration."""

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

_DEFAULT_REPORT_PERIOD = Batch(100)
_EARLY_REPORTS = (1, 2, 5, 10, 20, 50, 100)
"""Batches with an extra report before the first regular one."""
_NO_PROFILING = ProfilingSpec()


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Lengths, periods and policies of one :meth:`zerotrial.Trainer.fit`."""

    max_length: TrainUnit
    until: TrainUnit | None = None
    """Length after which this run pauses; None to train to ``max_length``."""
    validate_at: TrainUnit | None = None
    """Lengths at which to validate in addition to ``validation_period``."""
    report_period: TrainUnit | None = _DEFAULT_REPORT_PERIOD
    early_reports: bool = False
    """Also report the first batches at increasing intervals, so that short runs have a curve."""
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: Policy = "best"
    initial_validation: bool = False
    metric: str | None = None
    """Validation metric that selects the best checkpoint."""
    smaller_is_better: bool = True
    records_per_epoch: int = 0
    """Samples in one epoch if the loader has no length; 0 if unknown."""
    profiling: ProfilingSpec = _NO_PROFILING
    test_mode: bool = False
    """One batch, one validation batch, one checkpoint."""

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in ("best", "all", "none"):
            problem = f"must be best, all or none, got {self.checkpoint_policy!r}"
            raise ConfigError("fit", [f"checkpoint_policy: {problem}"])

    @classmethod
    def from_spec(cls, fit: FitSpec, *, test_mode: bool = False, **overrides: Any) -> "FitSettings":
        """Read the settings from a run's specification.

        Args:
            fit: Lengths and periods of the run.
            test_mode: Run one batch, one validation batch and one checkpoint.
            overrides: Fields that replace those of the experiment.

        Raises:
            ConfigError: If no maximum length is set.
        """
        if test_mode:
            overrides["max_length"] = Batch(1)
        if "max_length" not in overrides and fit.max_length is None:
            problem = "searcher.max_length: is missing; set it to {batches: n} or {epochs: n}"
            raise ConfigError("experiment", [problem])
        fields = {
            "max_length": _unit(fit.max_length),
            "until": _in_same_unit(fit.max_length, fit.until),
            "validate_at": _in_same_unit(fit.max_length, fit.validate_at),
            "report_period": Batch(fit.scheduling_unit),
            "early_reports": "report_period" not in overrides,
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
        return cls(**fields | overrides)

    def schedule(self, epoch_length: int | None) -> Schedule:
        """Convert all lengths to batches.

        Args:
            epoch_length: Batches in one epoch; ``None`` if the data has no length.

        Raises:
            ConfigError: If a length is in epochs and the data has no length.
        """
        if self.test_mode:
            return Schedule(max_steps=1, epoch_length=epoch_length)
        validate = Period.from_unit(self.validation_period, epoch_length)
        comparison = Period.from_unit(self.validate_at, epoch_length)
        report = Period.from_unit(self.report_period, epoch_length)
        if self.early_reports and report.every is not None:
            early = frozenset(step for step in _EARLY_REPORTS if step < report.every)
            report = replace(report, at=early)
        until = None if self.until is None else length_in_batches(self.until, epoch_length)
        return Schedule(
            until=until,
            max_steps=length_in_batches(self.max_length, epoch_length),
            epoch_length=epoch_length,
            report=report,
            validate=replace(validate, at=validate.at | comparison.at),
            checkpoint=Period.from_unit(self.checkpoint_period, epoch_length),
        )

    def improves(self, value: float | None, best: float | None) -> bool:
        """Return whether a validation is the best so far; NaN and missing values never are."""
        if value is None or value != value:  # noqa: PLR0124 - only NaN differs from itself
            return False
        if best is None:
            return True
        return value < best if self.smaller_is_better else value > best


def _unit(length: LengthSpec | None) -> TrainUnit | None:
    if length is None:
        return None
    return Batch(length.count) if length.unit == "batches" else Epoch(length.count)


def _in_same_unit(
    length: LengthSpec | None, value: int | Collection[int] | None
) -> TrainUnit | None:
    if length is None or not value:
        return None
    return Batch(value) if length.unit == "batches" else Epoch(value)
