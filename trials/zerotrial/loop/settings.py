"""How far a trial trains and when it does what, read from an experiment's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerolab.errors import ConfigError
from zerotrial.loop.units import (
    Batch,
    Epoch,
    Period,
    Schedule,
    TrainUnit,
    length_in_batches,
    parse_unit,
)

__all__ = ["FitSettings", "ProfilingSettings"]

Policy = Literal["best", "all", "none"]

_HUNDRED_BATCHES = Batch(100)


@dataclass(frozen=True)
class ProfilingSettings:
    """The ``profiling`` block: timings of the training loop, reported as system metrics."""

    enabled: bool = False
    begin_on_batch: int = 0
    """First batch (counted from 0) that is timed."""
    end_after_batch: int | None = None
    """Last batch that is timed; ``None`` for the end of training."""
    sync_timings: bool = True
    """Wait for the GPU before reading the clock."""

    def covers(self, batch: int) -> bool:
        """Whether a batch, counted from 0, is timed."""
        if not self.enabled or batch < self.begin_on_batch:
            return False
        return self.end_after_batch is None or batch <= self.end_after_batch


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What :meth:`zerotrial.Trainer.fit` was asked for, or an experiment's configuration says."""

    max_length: TrainUnit
    report_period: TrainUnit | None = _HUNDRED_BATCHES
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: Policy = "best"
    initial_validation: bool = False
    metric: str | None = None
    """Validation metric that tells which checkpoint is best."""
    smaller_is_better: bool = True
    records_per_epoch: int = 0
    """Samples in one epoch where the loader has no length; 0 when unknown."""
    profiling: ProfilingSettings = ProfilingSettings()
    test_mode: bool = False
    """One batch, one validation batch, one checkpoint."""

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in ("best", "all", "none"):
            found = f"must be best, all or none, got {self.checkpoint_policy!r}"
            raise ConfigError("fit", [f"checkpoint_policy: {found}"])

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, test_mode: bool = False) -> "FitSettings":
        """Read the configuration that a :class:`zerolab.contract.spec.RunSpec` carries.

        Raises:
            ConfigError: If a length is missing or malformed.
        """
        searcher = config.get("searcher") or {}
        return cls(
            max_length=Batch(1) if test_mode else _max_length(searcher),
            report_period=Batch(config.get("scheduling_unit") or 100),
            validation_period=parse_unit(
                config.get("min_validation_period"), "min_validation_period"
            ),
            checkpoint_period=parse_unit(
                config.get("min_checkpoint_period"), "min_checkpoint_period"
            ),
            checkpoint_policy=config.get("checkpoint_policy") or "best",
            initial_validation=bool(config.get("perform_initial_validation")),
            metric=searcher.get("metric"),
            smaller_is_better=searcher.get("smaller_is_better", True),
            records_per_epoch=config.get("records_per_epoch") or 0,
            profiling=ProfilingSettings(**(config.get("profiling") or {})),
            test_mode=test_mode,
        )

    def schedule(self, epoch_length: int | None) -> Schedule:
        """Turn all lengths into batches.

        Args:
            epoch_length: Batches in one epoch; ``None`` when the data has no length.

        Raises:
            ConfigError: If a length is in epochs and the data has no length.
        """
        if self.test_mode:
            return Schedule(max_steps=1, epoch_length=epoch_length)
        return Schedule(
            max_steps=length_in_batches(self.max_length, epoch_length),
            epoch_length=epoch_length,
            report=Period.of(self.report_period, epoch_length),
            validate=Period.of(self.validation_period, epoch_length),
            checkpoint=Period.of(self.checkpoint_period, epoch_length),
        )

    def improves(self, value: float | None, best: float | None) -> bool:
        """Whether a validation beats the best one so far; NaN and a missing value never do."""
        if value is None or value != value:  # noqa: PLR0124 - NaN alone differs from itself
            return False
        if best is None:
            return True
        return value < best if self.smaller_is_better else value > best


def _max_length(searcher: Mapping[str, Any]) -> TrainUnit:
    length = parse_unit(searcher.get("max_length"), "searcher.max_length")
    if length is not None:
        return length
    unit, number = searcher.get("time_metric") or "batches", searcher.get("max_time")
    if number is None or unit not in ("batches", "epochs"):
        problem = "searcher.max_length: is missing; set it to {batches: n} or {epochs: n}"
        raise ConfigError("experiment", [problem])
    return Batch(number) if unit == "batches" else Epoch(number)
