"""Live progress of an experiment: batch, loss, samples per second, remaining time."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolab.cli.log_stream import ENDED
from zerolab.cli.output import number
from zerolab.errors import UnreachableError
from zerolab.formatting import duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zerolab.client.http import Client

__all__ = ["ProgressLines", "TrialProgress", "describe_line", "watch"]

_RECENT_BATCHES = 300  # of a longer curve the server would return means
_POLL_S = 0.5
_LINE_S = 10.0
"""Seconds between lines of a trial, on outputs that cannot be redrawn."""
_SHOWN_TRIALS = 8
_IDLE_S = 5.0
"""Seconds without a running or queued trial after which paused ones are shown: trials of a search
pause at each rung, and wait there until it ends."""
_SPEED = "samples_per_second"


@dataclass(frozen=True)
class TrialProgress:
    """Displayed progress of a trial."""

    trial_id: int
    state: str
    batch: int
    progress: float
    """0 to 1."""
    metric: str = ""
    """Name of the displayed training metric: ``loss`` if there is one."""
    value: float | str | None = None
    speed: float | str | None = None
    """Samples per second, over all ranks."""
    remaining_s: float | None = None
    waiting: str | None = None
    """Reason why it has no slots."""
    assigned: bool = False
    """It holds slots."""
    activity: str | None = None
    """Activity that the run reports."""

    @property
    def doing(self) -> str:
        """Return a reason for waiting, or an activity other than training."""
        if self.state == "QUEUED" and not self.assigned:
            return "waiting for the scheduler"
        if self.state == "QUEUED":
            return self.activity or "preparing the run"
        if self.state == "RUNNING" and self.activity in {None, "starting"} and not self.batch:
            return "importing the code and building the trial"
        return "" if self.activity in {None, "training"} else str(self.activity)

    @property
    def has_trained(self) -> bool:
        """Return whether its run has trained a batch: metrics of an earlier run are outdated."""
        return self.batch > 0 and self.doing in {"", "validating", "checkpointing"}


def watch(client: "Client", experiment_id: int) -> dict[str, Any]:
    """Show progress on standard error until an experiment has ended; return it.

    A terminal is redrawn. Other outputs get a line for each trial every ten seconds and whenever
    its state changes.
    """
    watcher = _ProgressPoller(client, experiment_id)
    if not sys.stderr.isatty():
        return _watch_lines(watcher)
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        while True:
            experiment, trials = watcher.poll()
            live.update(_table(experiment, trials))
            if experiment["state"] in ENDED:
                return experiment
            time.sleep(_POLL_S)


def describe_line(trial: TrialProgress) -> str:
    """Return a trial's progress in one line."""
    if trial.waiting:
        return f"trial {trial.trial_id}  waits: {trial.waiting}"
    parts = [f"trial {trial.trial_id}", _state(trial)]
    if trial.state == "QUEUED":
        return "  ".join([*parts, trial.doing])
    parts += [trial.doing] if trial.doing else []
    if trial.doing and not trial.has_trained:
        if trial.batch:
            parts.append(f"after batch {trial.batch}")
        return "  ".join(parts)
    parts.append(f"batch {trial.batch}")
    if trial.has_trained and trial.value is not None:
        parts.append(f"{trial.metric} {number(trial.value)}")
    if trial.has_trained and isinstance(trial.speed, float | int):
        parts.append(f"{trial.speed:.0f} samples/s")
    parts.append(f"{100 * trial.progress:.0f} %")
    if trial.remaining_s is not None:
        parts.append(f"{duration_text(trial.remaining_s)} left")
    return "  ".join(parts)


def _state(trial: TrialProgress) -> str:
    starts = trial.state == "QUEUED" and trial.assigned
    return "starting:" if starts else f"{trial.state.lower()}{':' * (trial.state == 'QUEUED')}"


class _ProgressPoller:
    """Poller of the server that estimates the remaining time."""

    def __init__(self, client: "Client", experiment_id: int) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._first_seen: dict[int, tuple[float, float]] = {}
        """Time and progress of each trial when it was first seen to advance."""
        self._idle_since: float | None = None
        """Time since when no trial is running or queued."""
        self._last: tuple[dict[str, Any], list[TrialProgress]] | None = None

    def poll(self) -> tuple[dict[str, Any], list[TrialProgress]]:
        """Return the experiment and its running trials, or the last known ones."""
        try:
            experiment = self._client.experiment(self._experiment_id)
            trials = self._displayed_trials(experiment["state"])
            self._last = experiment, [self._progress(trial) for trial in trials]
        except UnreachableError:
            if self._last is None:
                raise
        return self._last

    def _displayed_trials(self, experiment_state: str) -> Sequence[dict[str, Any]]:
        """Return the first running trials, or else waiting ones; there may be thousands."""
        for state in ("RUNNING", "QUEUED"):
            trials = self._client.trials(self._experiment_id, state=state, limit=_SHOWN_TRIALS)
            if trials:
                self._idle_since = None
                return trials
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        is_idle = experiment_state == "ACTIVE" and time.monotonic() - self._idle_since > _IDLE_S
        if experiment_state != "PAUSED" and not is_idle:
            return []
        return self._client.trials(self._experiment_id, state="PAUSED", limit=_SHOWN_TRIALS)

    def _progress(self, trial: dict[str, Any]) -> TrialProgress:
        recent = max(0, trial["steps_completed"] - _RECENT_BATCHES)
        curves = self._client.metrics(trial["id"], first=recent)
        training = {
            curve["name"]: curve["points"] for curve in curves if curve["group"] == "training"
        }
        metric = "loss" if "loss" in training else next(iter(sorted(training)), "")
        speeds = [
            curve["points"] for curve in curves if curve["name"] == _SPEED and curve["points"]
        ]
        points = training.get(metric)
        return TrialProgress(
            trial_id=trial["id"],
            state=trial["state"],
            batch=trial["steps_completed"],
            progress=trial["progress"],
            metric=metric,
            value=points[-1][1] if points else None,
            speed=speeds[0][-1][1] if speeds else None,
            remaining_s=self._remaining_s(trial["id"], trial["state"], trial["progress"]),
            waiting=trial["waiting_reason"],
            assigned=trial["run_id"] is not None,
            activity=trial["activity"],
        )

    def _remaining_s(self, trial_id: int, state: str, progress: float) -> float | None:
        if progress <= 0 or state == "PAUSED":
            self._first_seen.pop(trial_id, None)
            return None
        began, at = self._first_seen.setdefault(trial_id, (time.monotonic(), progress))
        if progress <= at:
            return None
        return (time.monotonic() - began) * (1 - progress) / (progress - at)


class ProgressLines:
    """Rate limiter of progress lines on outputs that cannot be redrawn."""

    def __init__(self) -> None:
        self._displayed_trials: dict[int, tuple[float, str, str | None, str, str]] = {}
        """Time of the last line, state, reason for waiting, activity and line of each trial."""

    def next_lines(self, trials: list[TrialProgress], now_s: float) -> list[str]:
        """Return the lines to print now.

        Args:
            trials: Current progress.
            now_s: Seconds of a monotonic clock.
        """
        lines = []
        for trial in trials:
            start = (-math.inf, "", None, "", "")
            last_s, state, waiting, doing, last_line = self._displayed_trials.get(
                trial.trial_id, start
            )
            moved = (trial.state, trial.waiting) != (state, waiting)
            moved |= not trial.batch and trial.doing != doing
            line = describe_line(trial)
            if line != last_line and (moved or (not trial.waiting and now_s - last_s >= _LINE_S)):
                self._displayed_trials[trial.trial_id] = (
                    now_s,
                    trial.state,
                    trial.waiting,
                    trial.doing,
                    line,
                )
                lines.append(line)
        return lines


def _watch_lines(watcher: _ProgressPoller) -> dict[str, Any]:
    lines = ProgressLines()
    while True:
        experiment, trials = watcher.poll()
        for line in lines.next_lines(trials, time.monotonic()):
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress
        if experiment["state"] in ENDED:
            return experiment
        time.sleep(_POLL_S)


def _table(experiment: dict[str, Any], trials: list[TrialProgress]) -> "RenderableType":
    from rich.box import SIMPLE_HEAD
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.title = Text(
        f"experiment {experiment['id']}: {experiment['name']}  {experiment['state']}  "
        f"{100 * experiment['progress']:.0f} %  "
        f"best {experiment['metric']} {number(experiment['best_validation']) or '-'}"
    )
    for column in ("trial", "state", "batch", "loss", "samples/s", "progress", "left"):
        table.add_column(column)
    for trial in trials:
        if trial.waiting:
            table.add_row(str(trial.trial_id), "waits")
            continue
        named = trial.metric if trial.metric not in ("", "loss") else ""
        table.add_row(
            str(trial.trial_id),
            _state(trial).rstrip(":"),
            str(trial.batch),
            f"{named} {number(trial.value)}".strip() if trial.has_trained else "",
            f"{trial.speed:.0f}"
            if trial.has_trained and isinstance(trial.speed, float | int)
            else "",
            ProgressBar(total=1.0, completed=trial.progress, width=24),
            "" if trial.remaining_s is None else duration_text(trial.remaining_s),
        )
    waiting = [f"waits: {trial.waiting}" for trial in trials if trial.waiting]
    doing = [f"{_state(t)} {t.doing}" for t in trials if t.doing and not t.waiting]
    notes = dict.fromkeys([*waiting, *doing])
    if notes:
        table.caption = Text("\n".join(notes), style="yellow" if waiting else "dim")
    return table
