"""Runs: ``wandb.init`` and the methods of its result."""

import argparse
import atexit
import fnmatch
import glob
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from zerolab.client.imports import metric_group
from zerolab.extensions.wandb_api.artifact import Artifact
from zerolab.extensions.wandb_api.media_values import Histogram, Image, Media
from zerolab.extensions.wandb_api.report_target import LiveTarget, TrialTarget, open_target
from zerolab.extensions.wandb_api.run_values import Config, Summary
from zerolab.extensions.wandb_api.unsupported import advice

__all__ = ["Run", "RunDisabled", "Settings", "init", "print_line", "print_once"]

_printed: set[str] = set()


class Settings:
    """Settings of a run, as ``wandb.Settings``; ``mode`` has an effect, others are ignored.

    Args:
        values: Names to values.
    """

    def __init__(self, **values: Any) -> None:
        self.mode: str | None = None
        self.__dict__.update(values)


class Run:
    """Run of ``wandb.init``.

    Args:
        target: Receiver of the reports; None discards them.
        project: Project of ``wandb.init``.
        group: Group of ``wandb.init``.
        tags: Tags of ``wandb.init``.
        notes: Notes of ``wandb.init``.
    """

    current: ClassVar["Run | None"] = None
    """Run of this process that is not finished."""

    def __init__(
        self,
        target: TrialTarget | LiveTarget | None,
        project: str = "",
        group: str = "",
        tags: Sequence[str] = (),
        notes: str = "",
    ) -> None:
        self._target = target
        self.project, self.group, self.tags, self.notes = project, group, tuple(tags), notes
        self.entity = ""
        self.id = target.id if target else "disabled"
        self._name = target.name if target else "disabled"
        self.dir = str(target.directory if target else Path.cwd())
        self.starting_step = self.step = target.first_step if target else 0
        self._row: dict[str, Any] = {}
        self._step_metrics: dict[str, str] = {}
        """Patterns of metrics to the metric that is their step."""
        self._axes: dict[str, int] = {}
        """Metrics that are steps to their last values."""
        self.summary = Summary()
        hparams = target.hparams if target else {}
        changed = target.set_config if target else _ignore
        self.config = Config(hparams, changed, print_once)
        metric = target.train.info.fit.metric if target and target.train.info.fit else None
        self._searched_metric = metric
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the run; an exception makes it fail."""
        self._finish(None if error is None else f"{type(error).__name__}: {error}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(advice(name) or f"a run has no attribute {name!r}")

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        print_once("run.name: must be set in wandb.init(name=...); the experiment keeps its name")
        self._name = name

    @property
    def url(self) -> str:
        """Address in the web page; empty without a server."""
        return self._target.page if self._target else ""

    @property
    def path(self) -> str:
        """Project and id."""
        return f"{self.project}/{self.id}"

    @property
    def disabled(self) -> bool:
        """Whether all reports are discarded."""
        return self._target is None

    @property
    def offline(self) -> bool:
        """Whether no server has the run."""
        return not self.url

    @property
    def resumed(self) -> bool:
        """Whether the run continues an earlier one."""
        return self.starting_step > 0

    def log(
        self,
        data: Mapping[str, Any],
        step: int | None = None,
        commit: bool | None = None,  # noqa: FBT001 - as wandb
    ) -> None:
        """Report values of one step.

        Calls with the same ``step``, or with ``commit=False``, form one step.

        Args:
            data: Names to numbers, media, or dictionaries of them.
            step: Number of the step; by default the number of calls.
            commit: Whether the step is complete; by default if ``step`` is None.

        Example:
            >>> run = wandb.init(mode="disabled")
            >>> run.log({"loss": 0.5, "samples": wandb.Table(["text"], [["a"]])})
        """
        if self._is_finished:
            print_once("log: the run is finished; call wandb.init before wandb.log")
            return
        if step is not None and step < self.step:
            print_once(f"log: steps must not decrease, got {step} after {self.step}; it is ignored")
            return
        if step is not None and step > self.step:
            self._flush()
            self.step = int(step)
        self._row.update(_flatten(data))
        if commit or (commit is None and step is None):
            self._flush()
            self.step += 1

    def define_metric(
        self, name: str, step_metric: Any = None, *unused: Any, **options: Any
    ) -> None:
        """Use another metric as the step of a metric.

        Args:
            name: Name of the metric, or a pattern with ``*``.
            step_metric: Name of the metric with the steps.
            unused: Options without a counterpart; ignored.
            options: Options without a counterpart, such as ``summary``; ignored.
        """
        del unused, options
        if step_metric:
            self._step_metrics[name] = str(step_metric)
            self._axes.setdefault(str(step_metric), -1)

    def watch(self, *unused: Any, **options: Any) -> None:
        """Print that gradients are not recorded."""
        del unused, options
        print_once("watch: gradients are not recorded; log wandb.Histogram of the ones you need")

    def unwatch(self, *unused: Any) -> None:
        """Do nothing; see :meth:`watch`."""

    def save(
        self, glob_str: str | Path, base_path: str | Path | None = None, policy: str = "live"
    ) -> list[str]:
        """Report files as they are now.

        Args:
            glob_str: Path or pattern.
            base_path: Directory to which the names of the files are relative.
            policy: Ignored: files are stored at once.

        Returns:
            Paths of the files.
        """
        del policy
        pattern = str(glob_str)
        paths = [
            path
            for path in sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute patterns, too
            if Path(path).is_file()
        ]
        for path in paths:
            root = Path(base_path) if base_path else Path(path).parent
            name = Path(path).resolve().relative_to(root.resolve()).as_posix()
            if self._target is not None:
                self._target.train.report_file(name, path, self.step)
        if not paths:
            print_once(f"save: must match files, got {pattern!r}")
        return paths

    def log_artifact(
        self,
        artifact_or_path: Any,
        name: str | None = None,
        type: str = "",  # noqa: A002 - as wandb
        **unused: Any,
    ) -> Artifact:
        """Report the files of an artifact.

        Args:
            artifact_or_path: Artifact, or the path of a file or a directory.
            name: Name of the artifact of a path.
            type: Kind of the artifact of a path.
            unused: Options without a counterpart, such as ``aliases``; ignored.
        """
        del unused
        artifact = artifact_or_path
        if not isinstance(artifact, Artifact):
            path = Path(artifact_or_path)
            artifact = Artifact(name or f"run-{self.id}-{path.name}", type)
            (artifact.add_dir if path.is_dir() else artifact.add_file)(path)
        if self._target is not None:
            artifact.report(self._target.train, self.step)
        return artifact

    def log_code(self, *unused: Any, **options: Any) -> None:
        """Print that code is not recorded."""
        del unused, options
        print_once(
            "log_code: code is not recorded; `zerolab submit` stores the code of experiments"
        )

    def mark_preempting(self) -> None:
        """Do nothing: Zerolab knows the runs that it preempts."""

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:  # noqa: FBT001 - as wandb
        """Send the remaining reports and end the run.

        Args:
            exit_code: Exit code of the script; other than 0, the run fails.
            quiet: Ignored.
        """
        del quiet
        self._finish(f"exit code {exit_code}" if exit_code else None)

    def _label(self, *unused: Any, **options: Any) -> None:
        """Do nothing: integrations name themselves here."""

    def _finish(self, error: str | None) -> None:
        if self._is_finished:
            return
        self._complete()
        self._is_finished = True
        atexit.unregister(self._complete)
        if Run.current is self:
            Run.current = None
        if self._target is not None:
            self._target.finish(error)

    def _complete(self) -> None:
        """Report the last step, and the values that the script has set in the summary."""
        self._flush()
        numbers = {name: number for name, value in self.summary.assigned.items()
                   if (number := _number(value)) is not None}  # fmt: skip
        if numbers and self._target is not None:
            step = max([self.step, *self._axes.values()])
            self._target.train.report_metrics("summary", step, numbers)

    def _flush(self) -> None:
        row, self._row = self._row, {}
        if not row:
            return
        for name in self._axes.keys() & row.keys():
            number = _number(row[name])
            if number is not None and number >= 0:
                self._axes[name] = int(number)
        groups: dict[tuple[str, int], dict[str, float]] = {}
        for name, value in row.items():
            step = self._step_of(name)
            number = _number(value)
            if number is not None:
                self.summary.note(name, value)
                group, short = metric_group(name)
                if self._searched_metric in {name, short}:
                    group, short = "validation", self._searched_metric
                groups.setdefault((group, step), {})[short] = number
            elif self._target is not None:
                self._report_medium(name, value, step)
        if self._target is not None:
            for (group, step), metrics in groups.items():
                if group == "validation":
                    self._target.train.report_validation_metrics(step, metrics)
                else:
                    self._target.train.report_metrics(group, step, metrics)

    def _step_of(self, name: str) -> int:
        axis = self._step_metrics.get(name)
        if axis is None:
            patterns = (key for key in self._step_metrics if fnmatch.fnmatchcase(name, key))
            axis = self._step_metrics.get(next(patterns, ""))
        step = self._axes.get(axis, -1) if axis else -1
        return self.step if step < 0 else step

    def _report_medium(self, name: str, value: Any, step: int) -> None:
        assert self._target is not None
        train = self._target.train
        if isinstance(value, Media):
            value.report(train, name, step)
        elif isinstance(value, str):
            train.report_text(name, value, step)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Media):
            for item in value:
                item.report(train, name, step)
        elif hasattr(value, "shape") or _is_numbers(value):
            Histogram(value).report(train, name, step)
        elif hasattr(value, "savefig") or hasattr(value, "save"):  # matplotlib, PIL
            Image(value).report(train, name, step)
        else:
            print_once(f"log: {name}: must be a number or media, got {type(value).__name__}")


class RunDisabled(Run):
    """Run of ``wandb.init(mode="disabled")``, whose reports are discarded."""

    def __init__(self) -> None:
        super().__init__(None)


def init(
    project: str | None = None,
    *,
    config: Any = None,
    name: str | None = None,
    id: str | None = None,  # noqa: A002 - as wandb
    tags: Sequence[str] | None = None,
    group: str | None = None,
    job_type: str | None = None,
    notes: str | None = None,
    mode: str | None = None,
    dir: str | Path | None = None,  # noqa: A002 - as wandb
    settings: Settings | Mapping[str, Any] | None = None,
    reinit: Any = None,
    **options: Any,
) -> Run:
    """Start a run, or return the one of this process.

    Within a trial it is the run of the trial. Otherwise it reports to the server of
    ``ZEROLAB_MASTER``, or of this machine; without a server it writes to ``.zerolab/live``.

    Args:
        project: Project of the experiment, which is created if it is missing.
        config: Hyperparameters: dictionary, or the namespace of argparse.
        name: Name of the experiment.
        id: Id of the run; a script that uses it again continues the experiment.
        tags: Labels of the experiment.
        group: Label of the experiment.
        job_type: Label of the experiment.
        notes: Description of the experiment.
        mode: ``online``, ``offline`` (write to disk only) or ``disabled``.
        dir: Directory below which the reports are until they are sent.
        settings: Only ``mode`` has an effect.
        reinit: Whether to finish the run of this process first.
        options: Options without a counterpart, such as ``entity`` and ``resume``; ignored.

    Returns:
        The run.

    Raises:
        ConfigError: If an argument is invalid.
        NotImplementedError: If an option needs another command of Zerolab.

    Example:
        >>> import zerolab.compat.wandb as wandb
        >>> with wandb.init(project="digits", config={"lr": 0.1}, mode="disabled") as run:
        ...     run.log({"loss": 0.5})
    """
    for option in ("sync_tensorboard", "fork_from", "resume_from"):
        if options.get(option):
            raise NotImplementedError(advice(f"init({option})"))
    if Run.current is not None:
        if reinit in {None, False, "default", "return_previous"}:
            if config is not None:
                Run.current.config.update(config, allow_val_change=True)
            return Run.current
        Run.current.finish()
    variables = os.environ
    chosen = settings if isinstance(settings, Mapping) else vars(settings or Settings())
    mode = mode or chosen.get("mode") or variables.get("WANDB_MODE") or "online"
    if variables.get("WANDB_DISABLED", "").lower() in {"1", "true"}:
        mode = "disabled"
    if mode == "disabled":
        Run.current = RunDisabled()
    else:
        Run.current = _start(
            project or variables.get("WANDB_PROJECT", ""),
            id=id or variables.get("WANDB_RUN_ID", ""),
            name=name or variables.get("WANDB_NAME", ""),
            tags=tags or [tag for tag in variables.get("WANDB_TAGS", "").split(",") if tag],
            group=group or variables.get("WANDB_RUN_GROUP", ""),
            job_type=job_type or variables.get("WANDB_JOB_TYPE", ""),
            notes=notes or variables.get("WANDB_NOTES", ""),
            offline=mode in {"offline", "dryrun"},
            directory=dir or variables.get("WANDB_DIR"),
        )
    if config is not None:
        Run.current.config.update(config)
    return Run.current


def _start(
    project: str,
    *,
    id: str,  # noqa: A002 - as wandb
    name: str,
    tags: Sequence[str],
    group: str,
    job_type: str,
    notes: str,
    offline: bool,
    directory: str | Path | None,
) -> Run:
    labels = dict.fromkeys(label for label in (*tags, group, job_type) if label)
    target = open_target(
        id=id,
        name=name,
        project=project,
        labels=list(labels),
        description=notes,
        offline=offline,
        directory=None if directory is None else Path(directory, ".zerolab", "live"),
    )
    run = Run(target, project, group, tags, notes)
    atexit.register(run._complete)  # noqa: SLF001 - before the context of the run ends
    if target.is_live:
        print_line(f"reporting to {run.url or target.directory}")
    return run


def print_line(text: str) -> None:
    """Print a message to standard error.

    Args:
        text: The message.
    """
    print(f"zerolab: wandb: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for the user


def print_once(text: str) -> None:
    """Print a message, unless it was printed before.

    Args:
        text: The message.
    """
    if text not in _printed:
        _printed.add(text)
        print_line(text)


def _ignore(_values: Mapping[str, Any]) -> None:
    """Discard the configuration of a disabled run."""


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            values |= _flatten(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _number(value: Any) -> float | None:
    """Return a value as a number; None if it is something else."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str | Media | argparse.Namespace) or value is None:
        return None
    size = getattr(value, "size", None)
    count = getattr(value, "numel", None)
    elements = count() if callable(count) else size
    if hasattr(value, "item") and elements == 1:
        return float(value.item())
    return None


def _is_numbers(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(item, int | float) for item in value)
    )
