"""Target of a run's reports: the trial of this process, a server, or a local directory."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zerolab.core
from zerolab.contract.names import project_name
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec, read_run_spec
from zerolab.core.context import TrainContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.paths import Home, server_url
from zerolab.registry import PARTS
from zerolab.reports.reporter import Reporter

__all__ = ["LiveTarget", "TrialTarget", "open_target"]


class TrialTarget:
    """Run of this process that something else starts and ends: of a trial, or of the Core API.

    Args:
        train: Its reports.
    """

    is_live = False

    def __init__(self, train: TrainContext) -> None:
        self.train = train
        spec = train.info
        self.id = str(spec.trial_id or Path(spec.run_dir).name)
        self.name = str(spec.config.get("name", ""))
        self.directory = Path(spec.run_dir)
        self.first_step = 0
        self.hparams: dict[str, Any] = dict(spec.hparams)

    @property
    def page(self) -> str:
        """Address of the experiment in the web page; empty without a server."""
        spec = self.train.info
        return f"{spec.master}/#/experiments/{spec.experiment_id}" if spec.master else ""

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Do nothing: the experiment file has the hyperparameters."""

    def finish(self, error: str | None) -> None:
        """Upload the reports so far; the run ends with its process."""
        reporter = Reporter.newest_open
        if reporter is not None:
            reporter.flush()


class LiveTarget:
    """Run that reports to a server, or to a directory for ``zerolab sync``.

    Args:
        context: Context of the live run.
    """

    is_live = True

    def __init__(self, context: Any) -> None:
        self._context = context
        self.train: TrainContext = context.train
        self.id: str = context.id
        self.name: str = context.name
        self.directory: Path = context.directory
        self.first_step: int = context.connect()
        self.hparams: dict[str, Any] = {}

    @property
    def page(self) -> str:
        """Address of the experiment in the web page; empty until the server has it."""
        return str(self._context.page)

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Send the hyperparameters."""
        self._context.set_hparams(values)

    def finish(self, error: str | None) -> None:
        """Send the remaining reports and end the run."""
        self._context.finish(error=error)


def open_target(
    *,
    id: str,  # noqa: A002 - as wandb
    name: str,
    project: str,
    labels: Sequence[str],
    description: str,
    offline: bool,
    directory: Path | None,
) -> TrialTarget | LiveTarget:
    """Return the run of this process, or start a live run.

    Nothing here waits for other ranks: scripts call wandb in one of them.

    Args:
        id: Id of a live run; a new one if it is empty.
        name: Name of a live run; that of the script if it is empty.
        project: Project of a live run, which is created if it is missing.
        labels: Labels of a live run.
        description: Description of a live run.
        offline: Write a live run to disk only.
        directory: Directory for a live run until it is sent.

    Raises:
        ConfigError: If an argument is invalid.
    """
    if context := zerolab.core.current():
        return TrialTarget(context.train)
    if reporter := Reporter.newest_open:
        return TrialTarget(TrainContext(reporter.spec, reporter))
    path = os.environ.get(ENV_RUN_SPEC)
    if path:
        return TrialTarget(_train_of(read_run_spec(Path(path))))
    context = PARTS["live_runs"].init_live(
        server="" if offline else server_url(Home.default()) or "",
        id=id,
        name=name,
        project=project_name(project),
        create_project=True,
        labels=labels,
        description=description,
        directory=directory,
        ranks=SocketRanks.from_environment(environment={}),
        handle_sigterm=False,
    )
    return LiveTarget(context)


def _train_of(spec: RunSpec) -> TrainContext:
    """Return the reports of a script that has not joined its run; only rank 0 reports."""
    is_chief = os.environ.get("RANK", "0") == "0"
    return TrainContext(spec, Reporter(spec) if is_chief else None)
