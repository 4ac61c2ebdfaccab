"""What a script without a platform shows: a line now and then, and where the results lie."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["PROGRESS", "Console"]

_EVERY_S = 10.0
_SHOWN = 4
"""Metrics in a line at most; the file has all."""

PROGRESS = logging.getLogger("zerotrial.progress")
"""What people read while it runs; in a script of one's own it is shown without any set-up."""


class Console:
    """Tells progress through the logger ``zerotrial.progress``.

    Where a script has set up no logging, its lines go to standard error as they are.

    Args:
        run_dir: Where metrics and checkpoints go.
        max_steps: Batches to train in all.
        clock: Seconds that only go forward.
    """

    def __init__(
        self, run_dir: Path, max_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._max_steps = max_steps
        self._clock = clock
        self._said_at: float | None = None
        self._samples_per_second: float | None = None
        self._logger = PROGRESS if PROGRESS.hasHandlers() else _to_stderr()

    def begin(self, steps: int) -> None:
        """Say what begins, and where its results go."""
        begun = f"goes on after batch {steps}" if steps else "begins"
        self._logger.info(
            "training %s: %d batches in all; metrics and checkpoints go to %s",
            begun,
            self._max_steps,
            self._run_dir,
        )

    def speed(self, samples_per_second: float) -> None:
        """Note how fast it goes."""
        self._samples_per_second = samples_per_second

    def training(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Say how far it is; a line every ten seconds, however often there is a report."""
        now = self._clock()
        last = steps >= self._max_steps
        if self._said_at is not None and now - self._said_at < _EVERY_S and not last:
            return
        self._said_at = now
        speed = self._samples_per_second
        self._logger.info(
            "batch %d of %d  %s%s",
            steps,
            self._max_steps,
            _numbers(metrics),
            f"  {speed:.0f} samples/s" if speed is not None else "",
        )

    def validation(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Say what a validation gave."""
        self._logger.info("validation after batch %d: %s", steps, _numbers(metrics) or "no metrics")

    def end(self, steps: int, checkpoint: str | None) -> None:
        """Say how it ended, and where the results lie."""
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


def _numbers(metrics: Mapping[str, float]) -> str:
    first = sorted(metrics, key=lambda name: (name != "loss", name))[:_SHOWN]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in first)


def _to_stderr() -> logging.Logger:
    """Give the logger a handler, for a script that has set up none; as print, without a prefix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    PROGRESS.addHandler(handler)
    PROGRESS.propagate = False
    if PROGRESS.level == logging.NOTSET:
        PROGRESS.setLevel(logging.INFO)
    return PROGRESS
