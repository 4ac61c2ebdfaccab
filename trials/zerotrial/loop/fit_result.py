"""Result of a fit: history of the metrics, checkpoints, and the reason why it ended."""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.errors import ConfigError
from zerolab.formatting import html_table
from zerotrial.loop.stop_reason import StopReason

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FitResult",
    "History",
    "SavedCheckpoint",
    "Series",
    "display_path",
    "with_metrics",
]

_SHOWN_METRICS = 6


class Series:
    """Values of one metric over batches.

    Example:
        >>> from zerotrial.loop.fit_result import Series
        >>> loss = Series()
        >>> loss.append(10, 0.5)
        >>> loss.steps, loss.values, loss.last
        ([10], [0.5], 0.5)
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def append(self, steps: int, value: float) -> None:
        """Add the value at a batch.

        A second value at the same batch replaces the first.

        Args:
            steps: Batches completed.
            value: Value of the metric.

        Example:
            >>> from zerotrial.loop.fit_result import Series
            >>> loss = Series()
            >>> loss.append(10, 0.5)
            >>> list(loss)
            [(10, 0.5)]
        """
        if self._steps and self._steps[-1] == steps:
            self._values[-1] = value
            return
        self._steps.append(steps)
        self._values.append(value)

    @property
    def steps(self) -> list[int]:
        """Batches completed at each value."""
        return self._steps.tolist()

    @property
    def values(self) -> list[float]:
        """Values, one for each of :attr:`steps`."""
        return self._values.tolist()

    @property
    def last(self) -> float:
        """Newest value of the metric."""
        return self._values[-1]

    def at(self, steps: int) -> float | None:
        """Return the value after a number of batches.

        Args:
            steps: Batches completed.

        Returns:
            The value; None if there is no value at this batch.

        Example:
            >>> from zerotrial.loop.fit_result import Series
            >>> loss = Series()
            >>> loss.append(10, 0.5)
            >>> loss.at(10), loss.at(20)
            (0.5, None)
        """
        try:
            return self._values[self._steps.index(steps)]
        except ValueError:
            return None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps, self._values, strict=True)

    def __repr__(self) -> str:
        if not self._steps:
            return "Series(0 points)"
        return f"Series({len(self)} points, {self.last:.4g} at batch {self._steps[-1]})"


@dataclass
class History:
    """Metrics that a fit has reported, as :class:`Series` by name.

    A fit that resumes has the metrics from its first batch on. ``metrics.jsonl`` in the run's
    directory has those of earlier fits, too.

    Args:
        training: Training metrics, averaged over the batches of a report, and values of the engine.
        validation: Metrics of the validations.

    Example:
        >>> from zerotrial.loop.fit_result import History
        >>> history = History()
        >>> history.add("validation", 10, {"accuracy": 0.5})
        >>> history.validation["accuracy"].last
        0.5
    """

    training: dict[str, Series] = field(default_factory=dict)
    """Training metrics, averaged over the batches of a report, and values of the engine such as
    ``learning_rate`` and ``grad_norm``."""
    validation: dict[str, Series] = field(default_factory=dict)
    """Metrics of the validations."""

    def add(self, group: str, steps: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one report.

        Args:
            group: ``training`` or ``validation``.
            steps: Batches completed.
            metrics: Name to value.

        Example:
            >>> from zerotrial.loop.fit_result import History
            >>> history = History()
            >>> history.add("training", 10, {"loss": 0.5})
        """
        series: dict[str, Series] = getattr(self, group)
        for name, value in metrics.items():
            series.setdefault(name, Series()).append(steps, float(value))

    def to_pandas(self, group: str = "training") -> "pd.DataFrame":
        """Return metrics as a data frame; pandas must be installed.

        Args:
            group: ``training`` or ``validation``.

        Returns:
            Frame with a column for each metric and the batches as index, named ``batch``. A metric
            that was not reported after a batch is NaN there.

        Raises:
            ConfigError: If pandas is not installed, or the group is unknown.

        Example:
            >>> from zerotrial.loop.fit_result import History
            >>> history = History()
            >>> history.add("validation", 10, {"accuracy": 0.5})
            >>> history.to_pandas("validation")["accuracy"].tolist()
            [0.5]
        """
        if group not in ("training", "validation"):
            problem = f"group: must be training or validation, got {group!r}"
            raise ConfigError("to_pandas", [problem])
        try:
            import pandas as pd
        except ImportError:
            remedy = "run `pip install pandas`, or read .steps and .values"
            raise ConfigError("to_pandas", [f"pandas: must be installed; {remedy}"]) from None
        series: dict[str, Series] = getattr(self, group)
        columns = {name: pd.Series(one.values, one.steps) for name, one in series.items()}
        frame = pd.DataFrame(columns)
        frame.index.name = "batch"
        return frame

    def __repr__(self) -> str:
        groups = {"training": self.training, "validation": self.validation}
        texts = [f"{group}: {', '.join(series) or 'none'}" for group, series in groups.items()]
        return f"History({'; '.join(texts)})"


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint that a fit has saved, or has resumed from.

    Args:
        uuid: Unique name.
        path: Directory or address in an object store.
        steps_completed: Batches of training that it contains.
        metrics: Metrics of the validation after the same batch; empty without one.

    Example:
        >>> from zerotrial.loop.fit_result import SavedCheckpoint
        >>> checkpoint = SavedCheckpoint("5f2c", "zerolab_run/checkpoints/5f2c", 100)
        >>> print(checkpoint)
        zerolab_run/checkpoints/5f2c
    """

    uuid: str
    path: str
    """Directory or address in an object store; ``latest_checkpoint`` of a fit accepts it."""
    steps_completed: int
    """Batches of training that it contains."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the validation after the same batch; empty if there was none."""

    def __str__(self) -> str:
        return self.path


class FitResult(int):
    """Result of :meth:`zerotrial.Trainer.fit`, equal on all ranks.

    It is also the number of its :class:`~zerotrial.StopReason`: ``result == StopReason.FINISHED``
    and ``sys.exit(result)`` work.

    Example:
        >>> # Line is the trial in the example of zerotrial.Trainer.
        >>> with zerotrial.init() as context:
        ...     result = zerotrial.Trainer(Line(context), context).fit(max_length=16)
        >>> result == zerotrial.StopReason.FINISHED, result.summary
        (True, 'finished after 16 batches')
        >>> sorted(result.metrics), result.best_checkpoint.steps_completed
        (['loss'], 16)
    """

    stop_reason: StopReason
    """Why training ended."""
    steps_completed: int
    """Batches trained, those before a resume included."""
    max_steps: int
    """Batches that ``max_length`` requests."""
    history: History
    """Training and validation metrics."""
    checkpoints: list[SavedCheckpoint]
    """Checkpoints in the order of their batches."""
    run_dir: Path
    """Directory of the metrics file and, by default, of the checkpoints."""
    _metric: str | None
    _smaller_is_better: bool

    def __new__(
        cls,
        stop_reason: StopReason,
        *,
        steps_completed: int,
        max_steps: int,
        history: History,
        checkpoints: list[SavedCheckpoint],
        run_dir: Path,
        metric: str | None = None,
        smaller_is_better: bool = True,
    ) -> "FitResult":
        """Make a result.

        Args:
            stop_reason: Why training ended.
            steps_completed: Batches trained.
            max_steps: Batches that were requested.
            history: Reported metrics.
            checkpoints: Saved checkpoints, oldest first.
            run_dir: Directory of the run.
            metric: The searcher's metric, if there is a searcher.
            smaller_is_better: Direction of that metric.
        """
        self = super().__new__(cls, stop_reason)
        self.stop_reason = stop_reason
        self.steps_completed = steps_completed
        self.max_steps = max_steps
        self.history = history
        self.checkpoints = checkpoints
        self.run_dir = run_dir
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[StopReason], dict[str, Any]]:
        """Return the arguments of ``__new__``, for pickle and copy."""
        names = ("steps_completed", "max_steps", "history", "checkpoints", "run_dir")
        options = {name: getattr(self, name) for name in names}
        options |= {"metric": self._metric, "smaller_is_better": self._smaller_is_better}
        return (self.stop_reason,), options

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last validation; empty if there was none."""
        series = self.history.validation
        last = max((s.steps[-1] for s in series.values()), default=None)
        return {} if last is None else _values_at(series, last)

    @property
    def checkpoint(self) -> SavedCheckpoint | None:
        """Last checkpoint; None if there is none."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def best_metric(self) -> str | None:
        """Metric that selects :attr:`best_checkpoint`.

        It is the searcher's metric. Without a searcher it is the first validation metric whose name
        contains ``loss``, and None if there is no such metric.
        """
        if self._metric is not None:
            return self._metric
        return next((name for name in sorted(self.history.validation) if "loss" in name), None)

    @property
    def best_checkpoint(self) -> SavedCheckpoint | None:
        """Checkpoint with the best value of :attr:`best_metric`.

        It is the last checkpoint if no checkpoint has a value of the metric, and None if there is
        no checkpoint.
        """
        if self.best_metric is None:
            return self.checkpoint
        smaller = self._smaller_is_better if self._metric is not None else True
        return self.best(self.best_metric, smaller_is_better=smaller) or self.checkpoint

    def best(self, metric: str, *, smaller_is_better: bool = True) -> SavedCheckpoint | None:
        """Return the checkpoint with the best value of a validation metric.

        Its ``path`` is a ``latest_checkpoint`` for another fit.

        Args:
            metric: Name of a validation metric.
            smaller_is_better: False for metrics such as an accuracy.

        Returns:
            The first of the best checkpoints; None if no checkpoint has a value of the metric.

        Raises:
            ConfigError: If no validation has reported the metric.

        Example:
            >>> # Line is the trial in the example of zerotrial.Trainer.
            >>> with zerotrial.init() as context:
            ...     result = zerotrial.Trainer(Line(context), context).fit(max_length=16)
            >>> result.best("loss").steps_completed
            16
        """
        names = self.history.validation
        if metric not in names and metric != self._metric:
            known = ", ".join(sorted(names)) or "none"
            problem = f"metric: must be a validation metric ({known}), got {metric!r}"
            raise ConfigError("best", [problem])
        sign = 1 if smaller_is_better else -1
        ranked = [
            (sign * value, position)
            for position, saved in enumerate(self.checkpoints)
            if (value := saved.metrics.get(metric)) is not None and value == value  # noqa: PLR0124 - NaN
        ]
        return self.checkpoints[min(ranked)[1]] if ranked else None

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4g}" for name, value in self._shown().items())
        parts = [self.summary, values, f"best checkpoint {self._best_text()}"]
        return f"FitResult({'; '.join(part for part in parts if part)})"

    def _repr_html_(self) -> str:
        rows = {name: f"{value:.4g}" for name, value in self._shown().items()}
        rows["best checkpoint"] = self._best_text()
        rows["run directory"] = display_path(self.run_dir)
        return html_table(self.summary, rows)

    def _shown(self) -> dict[str, float]:
        return dict(list(self.metrics.items())[:_SHOWN_METRICS])

    @property
    def summary(self) -> str:
        """Summary of the training: ``finished after 80 batches``."""
        verb = "finished" if self.stop_reason is StopReason.FINISHED else "stopped"
        of = "" if self.steps_completed >= self.max_steps else f" of {self.max_steps}"
        reasons = {StopReason.FINISHED: "", StopReason.STOP_REQUESTED: " (stop requested)"}
        reason = reasons.get(self.stop_reason, f" ({self.stop_reason.name.lower()})")
        return f"{verb} after {self.steps_completed}{of} batches{reason}"

    def _best_text(self) -> str:
        best, metric = self.best_checkpoint, self.best_metric
        if best is None:
            return "none"
        value = best.metrics.get(metric or "")
        detail = f", {metric} {value:.4g}" if value is not None else ""
        return f"{best.uuid[:8]} (batch {best.steps_completed}{detail})"


def with_metrics(checkpoints: list[SavedCheckpoint], history: History) -> list[SavedCheckpoint]:
    """Return checkpoints with the metrics of the validations after the same batches."""
    return [
        SavedCheckpoint(
            saved.uuid,
            saved.path,
            saved.steps_completed,
            _values_at(history.validation, saved.steps_completed),
        )
        for saved in checkpoints
    ]


def display_path(path: Path) -> str:
    """Return a path as people read it: relative to the working directory if it is inside."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _values_at(series: Mapping[str, Series], steps: int) -> dict[str, float]:
    values: dict[str, Any] = {name: one.at(steps) for name, one in series.items()}
    return {name: value for name, value in values.items() if value is not None}
