"""The parts of the Core API: what a script reads, reports, saves, and asks."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from zerolab.config.experiment.run_overrides import determined_by_run
from zerolab.contract.hparam_reads import hand_out, tracked, warn_of_unread
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
from zerolab.core.machine_metrics import Machines, Sample
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerolab.core.socket_ranks import SocketRanks
from zerolab.determined import NamesReplacements
from zerolab.errors import (
    ConfigError,
    InvalidHyperparametersError,
    StaleRunError,
    is_storage_failure,
)
from zerolab.ranks import OneRank, Ranks
from zerolab.reports.reporter import METRICS_FILE, Reporter, plain_metadata
from zerolab.storage.store import CheckpointStore, Selector, list_files

__all__ = ["CheckpointContext", "Context", "PreemptContext", "TrainContext"]

logger = logging.getLogger(__name__)

Which = str | CheckpointRef
"""A checkpoint: its uuid, or :attr:`TrainContext.latest_checkpoint` itself."""


class TrainContext(NamesReplacements):
    """Hyperparameters in, metrics out.

    Every rank may report; only what the chief reports counts. What its machine does meanwhile is
    reported with it, where ``machines`` measures that; what the others do, whenever the ranks agree
    (:meth:`PreemptContext.should_preempt`).
    """

    def __init__(
        self, info: RunSpec, reporter: Reporter | None, machines: Machines | None = None
    ) -> None:
        self.info = info
        """Ids, seed, configuration and directories of this run."""
        self._reporter = reporter
        self._machines = machines
        self._steps: int | None = None
        self.asks_to_leave = False
        """Whether the script has asked whether to leave."""
        self.overrun: str | None = None
        """Set when the script has trained beyond :attr:`until`: what it should do."""
        self._bound = self.until if _is_searched(info) else None
        self.has_reached = False
        """Whether a validation at :attr:`until` has been reported, and more is to come later."""

    def get_hparams(self) -> dict[str, Any]:
        """Return this trial's hyperparameters, nested as in the experiment file."""
        hparams: dict[str, Any] = hand_out(tracked(self.info.hparams))
        return hparams

    @property
    def latest_checkpoint(self) -> CheckpointRef | None:
        """Where to go on from; None at the very beginning.

        Where ``warm_start`` is true it is another trial's: take its weights, and count from 0.
        """
        return self.info.latest_checkpoint

    @property
    def until(self) -> int | None:
        """How far this run should train, in the unit of the searcher's length; None: no bound.

        A searcher that compares trials at rungs lets a trial train so far first. Report a
        validation there, store a checkpoint and leave; the trial goes on from there if the
        searcher wants it to.
        """
        fit = self.info.fit
        if fit is None or fit.max_length is None:
            return None
        return fit.max_length.count if fit.until is None else fit.until

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of the training.

        Args:
            steps_completed: Batches (optimizer steps) completed.
            metrics: Name to number.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.
        """
        self.report_metrics("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of a validation; the searcher decides by them.

        Args:
            steps_completed: Batches (optimizer steps) completed.
            metrics: Name to number; must hold the searcher's metric.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.
        """
        self.report_metrics("validation", steps_completed, metrics)
        fit = self.info.fit
        if fit is None or fit.max_length is None or fit.until is None:
            return
        length = metrics.get("epochs") if fit.max_length.unit == "epochs" else steps_completed
        if isinstance(length, int | float) and length >= fit.until < fit.max_length.count:
            self.has_reached = True

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers of any group; see :meth:`Reporter.report_metrics`."""
        if self._reporter is None:
            return
        self._reporter.report_metrics(group, steps_completed, metrics)
        self._steps = steps_completed
        if self._bound is not None and self.overrun is None:
            self._check_bound(steps_completed, metrics)
        self.report_machine()

    def _check_bound(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Warn, once, of a script that trains on where its searcher wants it to stop."""
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
            "leave"
        )
        if not self.asks_to_leave:
            logger.warning("%s", self.overrun)

    def report_machine(self, *, last: bool = False) -> None:
        """Report what the chief's machine has done, if it is time to.

        Args:
            last: Do not wait for the time to pass.
        """
        if self._machines is not None and self._reporter is not None and self._steps is not None:
            self.report_machines([self._machines.take(now=last)])

    def take_machine(self) -> Sample:
        """What this rank has measured of its machine, for :meth:`report_machines`."""
        return None if self._machines is None else self._machines.take()

    def report_machines(self, samples: Sequence[Sample]) -> None:
        """Report what the ranks have measured, at the batch that was reported last.

        Args:
            samples: In the order of ranks.
        """
        if self._machines is None:
            return
        found = self._machines.named(samples)
        if found and self._reporter is not None and self._steps is not None:
            self._reporter.report_metrics("system", self._steps, found)

    def report_progress(self, progress: float) -> None:
        """Report how far the training is, 0 to 1."""
        if self._reporter is not None:
            self._reporter.report_progress(progress)


class CheckpointContext(NamesReplacements):
    """Checkpoints that are complete or not there, and that the server knows of."""

    def __init__(
        self,
        store: CheckpointStore,
        distributed: SocketRanks,
        reporter: Reporter | None,
        begins_with: CheckpointRef | None = None,
    ) -> None:
        self.store = store
        """The storage itself."""
        self._begins_with = begins_with
        self._distributed = distributed
        self._reporter = reporter

    @contextlib.contextmanager
    def store_path(
        self, metadata: Mapping[str, Any], *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Give a directory to fill; when the block ends, it becomes a checkpoint.

        An exception in the block, on any rank, leaves no checkpoint behind.

        Args:
            metadata: Kept with the checkpoint; ``steps_completed`` must be among it.
            shard: Every rank calls this (**Collective**), writes files into a directory of its
                own, and gives metadata; those of all ranks are merged at the end. Else only the
                chief may call it.

        Yields:
            The directory, and the new checkpoint's uuid.

        Raises:
            ConfigError: If ``metadata`` does not hold ``steps_completed``, or another rank than
                the chief calls this without ``shard``; on all ranks, if two have written different
                content to one name, or given one key of the metadata different values.
            StaleRunError: If another run has taken over; there is no checkpoint then.
            StorageError: On all ranks, if the storage cannot take it.
            PeerFailedError: If another rank failed; there is no checkpoint then.
        """
        steps = _steps_of(metadata)
        plain_metadata(metadata)
        ranks: Ranks = self._distributed if shard else OneRank()
        if not shard and not self._distributed.is_chief:
            problem = f"only the chief stores one without shard=True, this is rank {self._rank}"
            raise ConfigError("checkpoint", [problem])
        saver = CheckpointSaver(self.store, ranks, self._reporter)
        draft = saver.begin(apart=ranks.size > 1)
        try:
            with ranks.together("checkpoint: not stored"), saver.blaming_storage():
                yield draft.path, draft.uuid
        except BaseException:
            saver.abandon(draft)  # on all ranks or on none
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
        """Make a checkpoint of the files of a directory; return its uuid.

        Args:
            directory: What it is copied from.
            metadata: As for :meth:`store_path`.
            shard: As for :meth:`store_path`: **collective**, and each rank brings its own files.
            selector: Says of a file, by its path inside the directory, whether it belongs to it.

        Raises:
            ConfigError: As for :meth:`store_path`; if there is no such directory.
            StorageError: On all ranks, if the storage cannot take it.
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
        """Copy a checkpoint's files into a directory; any rank may call it, at any time.

        Args:
            uuid: Of the checkpoint, or what ``latest_checkpoint`` gives.
            directory: Where to; made if it is missing.
            selector: Says of a file, by its path inside the checkpoint, whether it is wanted.

        Raises:
            NotFoundError: If there is no such checkpoint, or a file of it is missing or damaged.
            StorageError: If the storage cannot be read.
        """
        name = _uuid(uuid)
        self._store_of(name).download(name, Path(directory), selector)

    def get_metadata(self, uuid: Which) -> dict[str, Any]:
        """Return what was stored with a checkpoint, ``steps_completed`` among it.

        Raises:
            NotFoundError: If there is no such checkpoint.
            StorageError: If the storage cannot be read.
        """
        name = _uuid(uuid)
        return dict(self._store_of(name).describe(name).metadata)

    def restore_path(
        self, uuid: Which, *, selector: Selector | None = None
    ) -> contextlib.AbstractContextManager[Path]:
        """Give a directory with a checkpoint's files, for reading, until the block ends.

        Any rank may call it, at any time; the checkpoint of another trial that this one begins
        with may lie in another storage. What an object store holds is fetched once for all ranks
        of a machine, and kept there for a while.

        Args:
            uuid: Of the checkpoint, or what ``latest_checkpoint`` gives.
            selector: Says of a file, by its path inside the checkpoint, whether it is wanted; an
                object store sends only those.

        Raises:
            NotFoundError: If there is no such checkpoint, or a file of it is missing or damaged.
            StorageError: If the storage cannot be read.
        """
        name = _uuid(uuid)
        return self._store_of(name).restore_path(name, selector)

    def _store_of(self, uuid: str) -> CheckpointStore:
        elsewhere = self._begins_with if self._begins_with and self._begins_with.root else None
        if elsewhere is not None and elsewhere.uuid == uuid:
            return self.store.elsewhere(elsewhere.storage)
        return self.store

    @property
    def _rank(self) -> int:
        return self._distributed.rank


class PreemptContext(NamesReplacements):
    """Whether to save a checkpoint and leave."""

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
        """Whether :meth:`should_preempt` has said yes."""

    def should_preempt(self) -> bool:
        """Return whether to save a checkpoint and leave; the same on every rank.

        Yes when the server wants the slots back or the trial to stop, when any rank was sent
        SIGTERM, or when another run has taken over. **Collective**: call it once a batch, or
        less often; it costs the ranks a round trip, which also brings the chief what the other
        machines measure.
        """
        self._train.asks_to_leave = True
        mine = self.wanted_here, self._train.take_machine()
        wanted, samples = zip(*self._distributed.allgather(mine), strict=True)
        self._train.report_machines(samples)
        if any(wanted):
            self.acknowledged = True
        return self.acknowledged

    @property
    def wanted_here(self) -> bool:
        """Whether this rank has been asked; others may not have been, and nothing is decided."""
        return bool(self._sigterm) or (self._poller is not None and self._poller.should_preempt)


class Context(NamesReplacements):
    """What ``zerolab.core.init()`` returns; use it in a ``with`` block.

    At the end of the block everything reported is shipped. When the script runs under a server
    and leaves because it was preempted, the process exits there, with the code that says so.
    """

    open_here: ClassVar["Context | None"] = None
    """The newest one of this process that is not closed."""

    def __init__(
        self,
        info: RunSpec,
        distributed: SocketRanks,
        store: CheckpointStore,
        *,
        platform: bool,
    ) -> None:
        self.info = info
        """Ids, seed, configuration and directories of this run."""
        self.distributed = distributed
        """Rank, size, and small collectives."""
        self._platform = platform
        self._results: Path | None = None
        self._known = contextlib.ExitStack()
        self._known.enter_context(determined_by_run(info))
        self._sigterm = SigtermFlag()
        self._reporter: Reporter | None = None
        self._poller: DirectivePoller | None = None
        if distributed.is_chief:
            self._reporter = Reporter(info)
            self._poller = DirectivePoller(info, self._reporter.stale, sigterm=False)
        self._machines = Machines(distributed) if platform and info.master else None
        self.train = TrainContext(info, self._reporter, self._machines)
        """Hyperparameters and metrics."""
        self.checkpoint = CheckpointContext(
            store, distributed, self._reporter, info.latest_checkpoint
        )
        """Storing and restoring."""
        self.preempt = PreemptContext(distributed, self._poller, self._sigterm, self.train)
        """Whether to leave."""
        Context.open_here = self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ship what is left; under a server, exit with the code that says why.

        Raises:
            SystemExit: If the run was preempted, has been taken over, declares its hyperparameters
                impossible, or was failed by its storage.
        """
        stale = self._reporter is not None and self._reporter.stale.is_set()
        self.close()
        if not self._platform:
            return
        if stale or isinstance(error, StaleRunError):
            self._leave(EXIT_STALE, "another run of this trial has taken over")
        if isinstance(error, InvalidHyperparametersError):
            self._leave(EXIT_INVALID_HP, str(error))
        if error is not None and is_storage_failure(error):
            logger.error("the storage failed", exc_info=error)
            self._leave(EXIT_INFRASTRUCTURE, str(error))
        if error is not None:
            return
        if self._reporter is not None:
            warn_of_unread(self.info)
        if self.train.has_reached:  # no failure of a rank: each of them ends by itself
            ignored = None if self.preempt.acknowledged else self.train.overrun
            write_reason(self.info.run_dir, EXIT_REACHED, ignored or REACHED_BOUND)
        elif self.preempt.acknowledged:
            self._leave(EXIT_PREEMPTED, "preempted")

    def close(self, timeout_s: float = 30.0) -> None:
        """Ship what was reported, and stop listening; what ``with`` does at its end.

        Args:
            timeout_s: Longest wait for the server; what it does not take by then, the agent
                ships later.
        """
        if Context.open_here is self:
            Context.open_here = None
        self._known.close()
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
        """Print where the results of a run without a server go, and at its end where they are."""
        if self._reporter is not None:
            self._results = directory
            _print(f"zerolab: run without a server; metrics and checkpoints go to {directory}")

    def _show_results(self, directory: Path) -> None:
        file = directory / METRICS_FILE
        found = self.checkpoint.store.latest()
        saved = "none" if found is None else self.checkpoint.store.address.at(found.uuid)
        _print(f"zerolab: metrics     {file}")
        _print(f"zerolab: checkpoint  {saved}")
        _print(f"zerolab: to browse   zerolab up && zerolab import {file}")

    def _leave(self, exit_code: int, reason: str) -> None:
        write_reason(self.info.run_dir, exit_code, reason)
        logger.info("leaving: %s", reason)
        sys.exit(exit_code)


def _print(line: str) -> None:
    """Print to standard error: what the script prints itself may be read by a program."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the user of a script


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
