"""Progress output of a script that runs without a platform.

A terminal and a notebook show a progress bar, and a line for each validation. Other outputs get
lines. A script that configures logging gets the lines through the logger ``zerotrial.progress``.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zerotrial.loop.fit_result import FitResult, display_path

__all__ = ["PROGRESS", "Console"]

_LOG_INTERVAL_S = 10.0
_REDRAW_INTERVAL_S = 0.2
_MAX_METRICS = 4
"""Maximum number of metrics in a line; ``metrics.jsonl`` has all."""

PROGRESS = logging.getLogger("zerotrial.progress")
"""Logger of progress messages. Its level silences all output."""


class _Display(Protocol):
    def line(self, text: str) -> None:
        """Show a line that stays."""

    def progress(self, steps: int, text: str) -> None:
        """Show how far training is.

        Args:
            steps: Batches completed.
            text: Metrics and speed.
        """

    def close(self) -> None:
        """Release the terminal."""


class Console:
    """Progress of one fit.

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
        self._metrics: Mapping[str, float] = {}
        self._samples_per_second: float | None = None
        self._display = _choose_display(max_steps, clock)

    def begin(self, steps: int) -> None:
        """Show the number of batches and the directory of the results."""
        directory = display_path(self._run_dir)
        if steps:
            self._display.line(f"resuming at batch {steps} of {self._max_steps} in {directory}")
        else:
            self._display.line(f"training {self._max_steps} batches, results in {directory}")

    def advance(self, steps: int, samples_per_second: float) -> None:
        """Show the progress and the current speed."""
        self._samples_per_second = samples_per_second
        if self._metrics:
            self._display.progress(steps, self._text())

    def training(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Show the progress and training metrics."""
        self._metrics = metrics
        self._display.progress(steps, self._text())

    def validation(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a validation."""
        self._display.line(f"batch {steps}  validation  {_format(metrics) or 'no metrics'}")

    def end(self, result: FitResult) -> None:
        """Show the end of training and the paths of its results."""
        file = display_path(self._run_dir / "metrics.jsonl")
        saved = result.checkpoint
        where = "none" if saved is None else display_path(Path(saved.path))
        if saved is not None and "://" in saved.path:
            where = saved.path
        self.close()
        self._display.line(
            f"{result.summary}\n  metrics     {file}\n  checkpoint  {where}\n"
            f"  web page    zerolab up && zerolab import {file}"
        )

    def close(self) -> None:
        """Release the terminal, after a failure as well."""
        self._display.close()

    def _text(self) -> str:
        speed = self._samples_per_second
        return _format(self._metrics) + (f"  {speed:.0f} samples/s" if speed is not None else "")


class _LogDisplay:
    """Lines through the logger, of the progress at most one every ten seconds."""

    def __init__(self, max_steps: int, clock: Callable[[], float]) -> None:
        self._max_steps = max_steps
        self._clock = clock
        self._logged_at: float | None = None
        self._logged_steps = 0

    def line(self, text: str) -> None:
        PROGRESS.info("%s", text)

    def progress(self, steps: int, text: str) -> None:
        now = self._clock()
        recent = self._logged_at is not None and now - self._logged_at < _LOG_INTERVAL_S
        if steps == self._logged_steps or (recent and steps < self._max_steps):
            return
        self._logged_at, self._logged_steps = now, steps
        PROGRESS.info("batch %d of %d  %s", steps, self._max_steps, text)

    def close(self) -> None:
        pass


class _TerminalDisplay:
    """Progress bar on standard error; the bar disappears at the end."""

    def __init__(self, max_steps: int) -> None:
        from rich.console import Console as Terminal
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("batch"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Terminal(stderr=True, highlight=False),
            transient=True,
            # A refresh thread could hold a lock while a data loader forks its workers.
            auto_refresh=False,
            # Prints of the script must not move from a redirected standard output to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._shown_at = -1.0
        self._task = self._bar.add_task("", total=max_steps)
        self._bar.start()

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def progress(self, steps: int, text: str) -> None:
        self._bar.update(self._task, completed=steps, description=text)
        now = time.monotonic()
        if now - self._shown_at >= _REDRAW_INTERVAL_S:
            self._shown_at = now
            self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


class _NotebookDisplay:
    """Progress bar in the output of a cell, and lines on standard output."""

    def __init__(self, max_steps: int) -> None:
        import IPython.display

        ipython: Any = IPython.display
        self._html = ipython.HTML
        self._max_steps = max_steps
        self._shown_at = -1.0
        self._handle = ipython.display(self._html(self._markup(0, "")), display_id=True)

    def line(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def progress(self, steps: int, text: str) -> None:
        now = time.monotonic()
        if now - self._shown_at < _REDRAW_INTERVAL_S and steps < self._max_steps:
            return
        self._shown_at = now
        self._handle.update(self._html(self._markup(steps, text)))

    def close(self) -> None:
        pass

    def _markup(self, steps: int, text: str) -> str:
        from html import escape

        bar = f'<progress value="{steps}" max="{self._max_steps}"></progress>'
        return f"<div>{bar} batch {steps} of {self._max_steps}&emsp;{escape(text)}</div>"


class _NoDisplay:
    """Null display of a script that has silenced the logger."""

    def line(self, _text: str) -> None:
        pass

    def progress(self, _steps: int, _text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _choose_display(max_steps: int, clock: Callable[[], float]) -> _Display:
    if PROGRESS.level > logging.INFO:
        return _NoDisplay()
    if PROGRESS.hasHandlers():
        return _LogDisplay(max_steps, clock)
    if _in_notebook():
        return _NotebookDisplay(max_steps)
    if sys.stderr.isatty():
        return _TerminalDisplay(max_steps)
    _log_to_stderr()
    return _LogDisplay(max_steps, clock)


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _format(metrics: Mapping[str, float]) -> str:
    shown = sorted(metrics, key=lambda name: (name != "loss", name))[:_MAX_METRICS]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in shown)


def _log_to_stderr() -> None:
    """Give the logger a handler that prints plain messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    PROGRESS.addHandler(handler)
    PROGRESS.propagate = False
    if PROGRESS.level == logging.NOTSET:
        PROGRESS.setLevel(logging.INFO)
