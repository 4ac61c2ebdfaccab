"""Progress output of a script that runs without a platform."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["PROGRESS", "Console"]

_LOG_INTERVAL_S = 10.0
_MAX_METRICS = 4
"""Maximum number of metrics in a line; ``metrics.jsonl`` has all."""

PROGRESS = logging.getLogger("zerotrial.progress")
"""Logger of progress messages; a script shows them without configuring logging."""


class Console:
    """Progress messages through the logger ``zerotrial.progress``.

    If the script has not configured logging, messages go to standard error without a prefix.

    Args:
        run_dir: Directory of metrics and checkpoints.
        max_steps: Total number of batches to train.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, run_dir: Path, max_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._max_steps = max_steps
        self._clock = clock
        self._logged_at: float | None = None
        self._samples_per_second: float | None = None
        self._logger = PROGRESS if PROGRESS.hasHandlers() else _log_to_stderr()

    def begin(self, steps: int) -> None:
        """Log the start of training and the directory of its results."""
        start = f"resumes after batch {steps}" if steps else "begins"
        self._logger.info(
            "training %s: %d batches in all; metrics and checkpoints go to %s",
            start,
            self._max_steps,
            self._run_dir,
        )

    def speed(self, samples_per_second: float) -> None:
        """Store the current speed for later messages."""
        self._samples_per_second = samples_per_second

    def training(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Log the progress, at most once every ten seconds."""
        now = self._clock()
        finished = steps >= self._max_steps
        if self._logged_at is not None and now - self._logged_at < _LOG_INTERVAL_S and not finished:
            return
        self._logged_at = now
        speed = self._samples_per_second
        self._logger.info(
            "batch %d of %d  %s%s",
            steps,
            self._max_steps,
            _format_metrics(metrics),
            f"  {speed:.0f} samples/s" if speed is not None else "",
        )

    def validation(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a validation."""
        self._logger.info(
            "validation after batch %d: %s", steps, _format_metrics(metrics) or "no metrics"
        )

    def end(self, steps: int, checkpoint: str | None) -> None:
        """Log the end of training and the paths of its results."""
        file = self._run_dir / "metrics.jsonl"
        self._logger.info(
            "%s after batch %d\n  metrics     %s\n  checkpoint  %s\n"
            "  to browse   zerolab up && zerolab import %s",
            "finished" if steps >= self._max_steps else "stopped",
            steps,
            file,
            checkpoint or "none",
            file,
        )


def _format_metrics(metrics: Mapping[str, float]) -> str:
    shown = sorted(metrics, key=lambda name: (name != "loss", name))[:_MAX_METRICS]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in shown)


def _log_to_stderr() -> logging.Logger:
    """Give the logger a handler that prints plain messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    PROGRESS.addHandler(handler)
    PROGRESS.propagate = False
    if PROGRESS.level == logging.NOTSET:
        PROGRESS.setLevel(logging.INFO)
    return PROGRESS
