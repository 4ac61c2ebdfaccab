"""Parts of the Core API: training, checkpoints, preemption, and their context."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from zerolab.config.experiment.run_overrides import apply_run_overrides
from zerolab.contract.hparam_reads import as_trial_hparams, tracked, warn_of_unread
from zerolab.contract.outcome import BEYOND_BOUND, REACHED_BOUND, write_reason
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_STALE,
    CheckpointRef,
    RunSpec,
)
from zerolab.core.checkpoint_writer import CheckpointSaver
from zerolab.core.machine_metrics import MachineMetrics, Sample
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import (
    ConfigError,
    InvalidHyperparametersError,
    StaleRunError,
    is_storage_failure,
)
from zerolab.ranks import OneRank, Ranks
from zerolab.replacements import NamesReplacements
from zerolab.reports.media_reports import MediaReports
from zerolab.reports.reporter import METRICS_FILE, Reporter, json_metadata
from zerolab.storage.store import CheckpointStore, Selector, list_files

__all__ = ["CheckpointContext", "Context", "PreemptContext", "TrainContext"]

logger = logging.getLogger(__name__)

Which = str | CheckpointRef
"""Checkpoint: its uuid, or :attr:`TrainContext.latest_checkpoint` itself."""


class TrainContext(MediaReports, NamesReplacements):
    """Hyperparameters, metrics and media of a trial: ``context.train``.

    Every rank may report; only the chief's reports count. System metrics of the chief's machine are
    reported with them. Those of other machines follow when the ranks communicate
    (:meth:`PreemptContext.should_preempt`).

    Example:
        >>> with zerolab.core.init(hparams={"lr": 0.1}) as context:
        ...     for step in range(1, 4):
        ...         context.train.report_training_metrics(step, {"loss": 1 / step})
    """

    def __init__(
        self, info: RunSpec, reporter: Reporter | None, machines: MachineMetrics | None = None
    ) -> None:
        self.info = info
        """Ids, seed, configuration and directories of this run."""
        self._reporter = reporter
        self._machines = machines
        self._steps: int | None = None
        self.polls_preemption = False
        """Whether the script checks for preemption."""
        self.overrun: str | None = None
        """Message with the remedy, set when the script has trained beyond :attr:`until`."""
        self._bound = self.until if _is_searched(info) else None
        self.has_reached = False
        """Whether a validation at :attr:`until` was reported, and the trial may continue later."""

    def get_hparams(self) -> dict[str, Any]:
        """Return this trial's hyperparameters, nested as in the experiment file.

        Returns:
            A dict of names to values; groups are dicts.

        Example:
            >>> with zerolab.core.init(hparams={"lr": 0.1}) as context:
            ...     context.train.get_hparams()["lr"]
            0.1
        """
        hparams: dict[str, Any] = as_trial_hparams(tracked(self.info.hparams))
        return hparams

    @property
    def latest_checkpoint(self) -> CheckpointRef | None:
        """Checkpoint to resume from; None at the first start.

        If its ``warm_start`` is true it belongs to another trial: load its weights, and count from
        0.
        """
        return self.info.latest_checkpoint

    @property
    def until(self) -> int | None:
        """Length to train to, in the unit of the searcher.

        None without a bound. A searcher that compares trials at rungs lets a trial train this far
        first. Report a validation there, store a checkpoint and exit. The trial resumes from there
        if the searcher promotes it.
        """
        fit = self.info.fit
        if fit is None or fit.max_length is None:
            return None
        return fit.max_length.count if fit.until is None else fit.until

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of the training.

        Args:
            steps_completed: Batches (optimizer steps) completed.
            metrics: Name to number. NaN and infinities are reported as such.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_training_metrics(100, {"loss": 0.25, "lr": 1e-3})
        """
        self.report_metrics("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of a validation; the searcher uses them.

        Args:
            steps_completed: Batches (optimizer steps) completed.
            metrics: Name to number; must contain the searcher's metric.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_validation_metrics(100, {"accuracy": 0.97})
        """
        self.report_metrics("validation", steps_completed, metrics)
        fit = self.info.fit
        if fit is None or fit.max_length is None or fit.until is None:
            return
        length = metrics.get("epochs") if fit.max_length.unit == "epochs" else steps_completed
        if isinstance(length, int | float) and length >= fit.until < fit.max_length.count:
            self.has_reached = True

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of any group.

        Args:
            group: Name of the group, such as ``training``, ``validation`` or ``test``.
            steps_completed: Batches (optimizer steps) completed.
            metrics: Name to number.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0, or the group's
                name is invalid.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_metrics("test", 100, {"accuracy": 0.97})
        """
        if self._reporter is None:
            return
        self._reporter.report_metrics(group, steps_completed, metrics)
        self._steps = steps_completed
        if self._bound is not None and self.overrun is None:
            self._check_bound(steps_completed, metrics)
        self.report_machine()

    def _check_bound(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Warn once if a script trains beyond its searcher's bound."""
        fit = self.info.fit
        assert fit is not None
        assert fit.max_length is not None
        unit = fit.max_length.unit
        length = metrics.get("epochs") if unit == "epochs" else steps_completed
        if not isinstance(length, int | float) or self._bound is None or length <= self._bound:
            return
        self.overrun = (
            f"{BEYOND_BOUND} {self._bound} {unit}, where the searcher compares its "
            "trials: read context.train.until, report a validation there, store a checkpoint and "
            "exit"
        )
        if not self.polls_preemption:
            logger.warning("%s", self.overrun)

    def report_machine(self, *, last: bool = False) -> None:
        """Report the system metrics of the chief's machine, if they are due.

        Args:
            last: Report them even if they are not due.
        """
        if self._machines is not None and self._reporter is not None and self._steps is not None:
            self.report_machines([self._machines.take(now=last)])

    def take_machine(self) -> Sample:
        """Return this rank's sample of its machine for :meth:`report_machines`."""
        return None if self._machines is None else self._machines.take()

    def report_machines(self, samples: Sequence[Sample]) -> None:
        """Report the samples of all ranks, at the last reported batch.

        Args:
            samples: In the order of ranks.
        """
        if self._machines is None:
            return
        values = self._machines.named(samples)
        if values and self._reporter is not None and self._steps is not None:
            self._reporter.report_metrics("system", self._steps, values)

    def _media_reporter(self) -> Reporter | None:
        return self._reporter

    def _media_step(self) -> int:
        return self._steps or 0

    def report_progress(self, progress: float) -> None:
        """Report the progress of the training.

        Args:
            progress: From 0 to 1.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_progress(0.5)
        """
        if self._reporter is not None:
            self._reporter.report_progress(progress)


class CheckpointContext(NamesReplacements):
    """Storing and loading of checkpoints: ``context.checkpoint``.

    A checkpoint is complete or does not exist.

    Example:
        >>> with zerolab.core.init() as context:
        ...     with context.checkpoint.store_path({"steps_completed": 100}) as (path, uuid):
        ...         size = (path / "weights.txt").write_text("0.5")
        ...     with context.checkpoint.restore_path(uuid) as path:
        ...         (path / "weights.txt").read_text()
        '0.5'
    """

    def __init__(
        self,
        store: CheckpointStore,
        distributed: SocketRanks,
        reporter: Reporter | None,
        begins_with: CheckpointRef | None = None,
    ) -> None:
        self.store = store
        """Storage of the checkpoints."""
        self._initial_checkpoint = begins_with
        self._distributed = distributed
        self._reporter = reporter

    @contextlib.contextmanager
    def store_path(
        self, metadata: Mapping[str, Any], *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Yield a directory that becomes a checkpoint when the block ends.

        An exception in the block, on any rank, leaves no checkpoint behind.

        Args:
            metadata: Stored with the checkpoint; must contain ``steps_completed``.
            shard: Every rank calls this (**Collective**), writes files into its own directory, and
                passes metadata; all are merged at the end. Otherwise only the chief may call it.

        Yields:
            The directory, and the new checkpoint's uuid.

        Raises:
            ConfigError: If ``metadata`` does not contain ``steps_completed``, or another rank than
                the chief calls this without ``shard``; on all ranks, if two ranks have written
                different content to one file, or passed different values for one key of the
                metadata.
            StaleRunError: If another run has taken over; no checkpoint is stored then.
            StorageError: On all ranks, if the storage fails.
            PeerFailedError: If another rank failed; no checkpoint is stored then.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> with zerolab.core.init() as context:
            ...     with context.checkpoint.store_path({"steps_completed": 100}) as (path, uuid):
            ...         torch.save(model.state_dict(), path / "model.pt")
        """
        steps = _steps_of(metadata)
        json_metadata(metadata)
        ranks: Ranks = self._distributed if shard else OneRank()
        if not shard and not self._distributed.is_chief:
            problem = f"only the chief stores one without shard=True, this is rank {self._rank}"
            raise ConfigError("checkpoint", [problem])
        saver = CheckpointSaver(self.store, ranks, self._reporter)
        draft = saver.begin(per_rank=ranks.size > 1)
        try:
            with ranks.together("checkpoint: not stored"), saver.storage_errors():
                yield draft.path, draft.uuid
        except BaseException:
            saver.abandon(draft)  # together() raises on all ranks or on none
            raise
        saver.publish(draft, steps, metadata)

    def upload(
        self,
        directory: str | Path,
        metadata: Mapping[str, Any],
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Store the files of a directory as a checkpoint; return its uuid.

        Args:
            directory: Source directory.
            metadata: As for :meth:`store_path`.
            shard: As for :meth:`store_path`: **collective**, and each rank uploads its own files.
            selector: Returns whether a file belongs to the checkpoint, by its path inside the
                directory.

        Returns:
            Uuid of the new checkpoint.

        Raises:
            ConfigError: As for :meth:`store_path`; if the directory does not exist.
            StorageError: On all ranks, if the storage fails.

        Example:
            >>> from pathlib import Path
            >>> Path("output").mkdir()
            >>> size = Path("output/weights.txt").write_text("0.5")
            >>> with zerolab.core.init() as context:
            ...     uuid = context.checkpoint.upload("output", {"steps_completed": 100})
        """
        source = Path(directory)
        with self.store_path(metadata, shard=shard) as (path, uuid):
            if not source.is_dir():
                raise ConfigError("checkpoint", [f"{source}: must be a directory that exists"])
            for name in list_files(source):
                if selector is None or selector(name):
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, path / name)
        return uuid

    def download(
        self, uuid: Which, directory: str | Path, *, selector: Selector | None = None
    ) -> None:
        """Copy a checkpoint's files into a directory.

        Any rank may call it, at any time.

        Args:
            uuid: Uuid of the checkpoint, or the value of ``latest_checkpoint``.
            directory: Target directory; created if missing.
            selector: Returns whether a file is needed, by its path inside the checkpoint.

        Raises:
            NotFoundError: If the checkpoint does not exist, or a file of it is missing or damaged.
            StorageError: If the storage cannot be read.

        Example:
            >>> from pathlib import Path
            >>> with zerolab.core.init() as context:
            ...     with context.checkpoint.store_path({"steps_completed": 100}) as (path, uuid):
            ...         size = (path / "weights.txt").write_text("0.5")
            ...     context.checkpoint.download(uuid, "copy")
            >>> Path("copy/weights.txt").read_text()
            '0.5'
        """
        name = _uuid(uuid)
        self._store_of(name).download(name, Path(directory), selector)

    def get_metadata(self, uuid: Which) -> dict[str, Any]:
        """Return the metadata of a checkpoint.

        Args:
            uuid: Uuid of the checkpoint, or the value of ``latest_checkpoint``.

        Returns:
            The dict passed to :meth:`store_path`, with ``steps_completed``.

        Raises:
            NotFoundError: If the checkpoint does not exist.
            StorageError: If the storage cannot be read.

        Example:
            >>> with zerolab.core.init() as context:
            ...     with context.checkpoint.store_path({"steps_completed": 100}) as (path, uuid):
            ...         size = (path / "weights.txt").write_text("0.5")
            ...     context.checkpoint.get_metadata(uuid)
            {'steps_completed': 100}
        """
        name = _uuid(uuid)
        return dict(self._store_of(name).describe(name).metadata)

    def restore_path(
        self, uuid: Which, *, selector: Selector | None = None
    ) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager with the files of a checkpoint.

        Any rank may call it, at any time. The files are for reading only. The checkpoint of a warm
        start may be in another storage. Files of an object store are downloaded once for all ranks
        of a machine, and cached.

        Args:
            uuid: Uuid of the checkpoint, or the value of ``latest_checkpoint``.
            selector: Returns whether a file is needed, by its path inside the checkpoint; only
                those are downloaded from an object store.

        Returns:
            A context manager that yields the directory as a ``Path``.

        Raises:
            NotFoundError: If the checkpoint does not exist, or a file of it is missing or damaged.
            StorageError: If the storage cannot be read.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> with zerolab.core.init() as context:
            ...     latest = context.train.latest_checkpoint
            ...     if latest is not None:
            ...         with context.checkpoint.restore_path(latest) as path:
            ...             keys = model.load_state_dict(torch.load(path / "model.pt"))
        """
        name = _uuid(uuid)
        return self._store_of(name).restore_path(name, selector)

    def _store_of(self, uuid: str) -> CheckpointStore:
        elsewhere = (
            self._initial_checkpoint
            if self._initial_checkpoint and self._initial_checkpoint.root
            else None
        )
        if elsewhere is not None and elsewhere.uuid == uuid:
            return self.store.elsewhere(elsewhere.storage)
        return self.store

    @property
    def _rank(self) -> int:
        return self._distributed.rank


class PreemptContext(NamesReplacements):
    """Requests to save a checkpoint and exit: ``context.preempt``.

    Example:
        >>> with zerolab.core.init() as context:
        ...     for step in range(1, 4):
        ...         if context.preempt.should_preempt():
        ...             break  # after storing a checkpoint
    """

    def __init__(
        self,
        distributed: SocketRanks,
        poller: DirectivePoller | None,
        sigterm: SigtermFlag,
        train: TrainContext,
    ) -> None:
        self._distributed = distributed
        self._poller = poller
        self._sigterm = sigterm
        self._train = train
        self.acknowledged = False
        """Whether :meth:`should_preempt` has returned True."""

    def should_preempt(self) -> bool:
        """Return whether to save a checkpoint and exit. **Collective**.

        True when the server needs the slots or stops the trial, when any rank received SIGTERM, or
        when another run has taken over. Call it once a batch, or less often. It costs the ranks a
        round trip, which also carries the system metrics of other machines to the chief.

        Returns:
            The same value on every rank; True at all calls after the first True.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.preempt.should_preempt()
            False
        """
        self._train.polls_preemption = True
        state = self.requested_on_rank, self._train.take_machine()
        requests, samples = zip(*self._distributed.allgather(state), strict=True)
        self._train.report_machines(samples)
        if any(requests):
            self.acknowledged = True
        return self.acknowledged

    @property
    def requested_on_rank(self) -> bool:
        """Whether this rank received a request.

        Other ranks may not have received it, so decide by :meth:`should_preempt`.
        """
        return bool(self._sigterm) or (self._poller is not None and self._poller.should_preempt)


class Context(NamesReplacements):
    """Context of a run; use it in a ``with`` block.

    ``zerolab.core.init()`` returns it. All reports are uploaded at the end of the block. If the
    script runs under a server and exits because it was preempted, the process exits there with the
    preemption exit code.

    Args:
        info: Specification of the run.
        distributed: Ranks of the run.
        store: Storage of its checkpoints.
        platform: Whether the script runs under a server.
        reporter: Reporter of the chief; by default a new one.

    Example:
        >>> with zerolab.core.init(hparams={"lr": 0.1}) as context:
        ...     context.train.report_validation_metrics(100, {"loss": 0.25})
        ...     context.distributed.is_chief
        True
    """

    newest_open: ClassVar["Context | None"] = None
    """Newest context of this process that is not closed."""

    def __init__(
        self,
        info: RunSpec,
        distributed: SocketRanks,
        store: CheckpointStore,
        *,
        platform: bool,
        reporter: Reporter | None = None,
    ) -> None:
        self.info = info
        """Ids, seed, configuration and directories of this run."""
        self.distributed = distributed
        """Rank, size, and collectives for small values."""
        self._platform = platform
        self._results: Path | None = None
        self._exit_stack = contextlib.ExitStack()
        self._exit_stack.enter_context(apply_run_overrides(info))
        self._sigterm = SigtermFlag()
        self._reporter: Reporter | None = None
        self._poller: DirectivePoller | None = None
        if distributed.is_chief:
            self._reporter = reporter or _open_reporter(info, platform=platform) or Reporter(info)
            self._poller = DirectivePoller(info, self._reporter.stale, sigterm=False)
        self._machines = MachineMetrics(distributed) if platform and info.master else None
        self.train = TrainContext(info, self._reporter, self._machines)
        """Hyperparameters and metrics."""
        self.checkpoint = CheckpointContext(
            store, distributed, self._reporter, info.latest_checkpoint
        )
        """Storing and loading of checkpoints."""
        self.preempt = PreemptContext(distributed, self._poller, self._sigterm, self.train)
        """Request to save a checkpoint and exit."""
        Context.newest_open = self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Upload the remaining reports; under a server, exit with the code of the reason.

        Raises:
            SystemExit: If the run was preempted or taken over, declared its hyperparameters
                invalid, or failed because of its storage.
        """
        stale = self._reporter is not None and self._reporter.stale.is_set()
        self.close()
        if not self._platform:
            return
        if stale or isinstance(error, StaleRunError):
            self._exit(EXIT_STALE, "another run of this trial has taken over")
        if isinstance(error, InvalidHyperparametersError):
            self._exit(EXIT_INVALID_HP, str(error))
        if error is not None and is_storage_failure(error):
            logger.error("the checkpoint storage failed; the trial restarts later", exc_info=error)
            self._exit(EXIT_INFRASTRUCTURE, str(error))
        if error is not None:
            return
        is_over = self.train.has_reached or not self.preempt.acknowledged
        if self._reporter is not None and is_over:
            warn_of_unread(self.info)
        if self.train.has_reached:  # not a failure: each rank ends by itself
            ignored = None if self.preempt.acknowledged else self.train.overrun
            write_reason(self.info.run_dir, EXIT_REACHED, ignored or REACHED_BOUND)
        elif self.preempt.acknowledged:
            self._exit(EXIT_PREEMPTED, "preempted")

    def alert(self, title: str, text: str = "") -> None:
        """Send a message to the log and to notification channels.

        Every rank may call it; only the chief's messages count. It neither waits for the server nor
        fails. Channels get at most ten alerts of an experiment in an hour.

        Args:
            title: At most 200 characters; the rest is cut off.
            text: At most 4,000 characters; the rest is cut off.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.alert("Loss spike", "loss 8.1 at step 300; it was 2.3")
        """
        if self._reporter is not None:
            self._reporter.report_alert(title, text)

    def close(self, timeout_s: float = 30.0) -> None:
        """Upload the reports and stop polling; called at the end of ``with``.

        Args:
            timeout_s: Maximum wait for the server, in seconds; the agent uploads the rest later.

        Example:
            >>> context = zerolab.core.init()
            >>> context.close()
        """
        if Context.newest_open is self:
            Context.newest_open = None
        self._exit_stack.close()
        if self._poller is not None:
            self._poller.close()
        if self._machines is not None:
            self.train.report_machine(last=True)
            self._machines.close()
        if self._reporter is not None:
            self._reporter.close(timeout_s)
            if self._results is not None:
                self._show_results(self._results)
                self._results = None
        self._sigterm.restore()
        self.distributed.close()

    def show_results_in(self, directory: Path) -> None:
        """Print the result directory of a run without a server.

        It is printed now, and its files at the end.
        """
        if self._reporter is not None:
            self._results = directory
            _print(f"zerolab: run without a server; metrics and checkpoints go to {directory}")

    def _show_results(self, directory: Path) -> None:
        file = directory / METRICS_FILE
        latest = self.checkpoint.store.latest()
        saved = "none" if latest is None else self.checkpoint.store.address.at(latest.uuid)
        _print(f"zerolab: metrics     {file}")
        _print(f"zerolab: checkpoint  {saved}")
        _print(f"zerolab: to browse   zerolab up && zerolab import {file}")

    def _exit(self, exit_code: int, reason: str) -> None:
        write_reason(self.info.run_dir, exit_code, reason)
        logger.info("this rank exits: %s", reason)
        sys.exit(exit_code)


def _print(line: str) -> None:
    """Print to standard error, as a program may parse the script's standard output."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the user of a script


def _open_reporter(info: RunSpec, *, platform: bool) -> Reporter | None:
    """Return the reporter that calls of wandb have opened for the run of this process."""
    reporter = Reporter.newest_open
    is_same = reporter is not None and reporter.spec.run_dir == info.run_dir
    return reporter if platform and is_same else None


def _is_searched(info: RunSpec) -> bool:
    searcher = info.config.get("searcher")
    return isinstance(searcher, Mapping) and searcher.get("name") != "single"


def _uuid(which: Which) -> str:
    return which.uuid if isinstance(which, CheckpointRef) else which


def _steps_of(metadata: Mapping[str, Any]) -> int:
    steps = metadata.get("steps_completed")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        problem = f"must hold the batches completed, a whole number of at least 0, got {steps!r}"
        raise ConfigError("checkpoint metadata", [f"steps_completed: {problem}"])
    return steps
