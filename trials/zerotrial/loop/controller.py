"""Training loop of a trial: train, report, validate, checkpoint and stop.

The loop runs from one *stop* to the next. A stop is a batch after which more than a report is due
(:class:`zerotrial.loop.units.Schedule`), or after which the ranks agree whether to continue.
Between two stops only the user's ``train_batch`` and reports of its metrics run.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from zerolab.contract.messages import Extension
from zerolab.core.machine_metrics import MachineMetrics
from zerolab.core.preemption import DirectivePoller, SigtermFlag, request_extension
from zerolab.errors import TrialError
from zerolab.reports.reporter import Reporter
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.data.batch_iterators import BatchIterator, EmptyBatchIterator, make_batch_iterator
from zerotrial.data.random_state import derive_seed
from zerotrial.loop.batch_checks import (
    BatchChecks,
    IteratorArgumentCheck,
    MissingLoaderCheck,
    SkippedStepMonitor,
)
from zerotrial.loop.checkpoints import CheckpointManager, SavedState
from zerotrial.loop.console import Console
from zerotrial.loop.fit_result import FitResult, History, with_metrics
from zerotrial.loop.metrics import Entry
from zerotrial.loop.profiling import LoopTimings
from zerotrial.loop.recorder import Recorder
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import StopReason, StopSignals
from zerotrial.loop.units import Schedule
from zerotrial.loop.validation import ValidationInterruptedError, Validator
from zerotrial.trial import ZeroTrial

__all__ = ["Controller", "agree_on_epoch_length", "make_training_iterator"]

logger = logging.getLogger(__name__)
_AGREEMENT_INTERVAL_S = 1.0
"""Approximate seconds of training between two agreements of the ranks whether to continue."""
_MAX_AGREEMENT_BATCHES = 10_000
_EARLY_BATCHES = 100
"""Number of first batches that are reported at least every 5 s."""


def _only_value(metrics: dict[str, float]) -> float | None:
    """Return the value of the only metric; None if there are several."""
    return next(iter(metrics.values())) if len(metrics) == 1 else None


class Controller:
    """Training loop of one trial on one rank; all ranks run it in step.

    Args:
        trial: The user's trial.
        context: Its context, with an engine wrapped.
        settings: Lengths, periods and policies.
        reporter: The run's reporter; ``None`` on all ranks but the chief.
        poller: Source of preemption requests; the SIGTERM flag on ranks other than the chief.

    Raises:
        TrialError: If the trial has wrapped no engine, or its loaders are invalid.
        ConfigError: If a length cannot be converted into batches.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        settings: FitSettings,
        reporter: Reporter | None,
        poller: DirectivePoller | SigtermFlag | None = None,
    ) -> None:
        if not context.models:
            raise TrialError(
                f"{type(trial).__name__}.__init__: must wrap an engine with "
                "context.wrap_model_engine(zerotrial.initialize(...)[0])"
            )
        self._trial = trial
        self._context = context
        self._settings = settings
        self._stop_signals = StopSignals(context, poller)
        self._reporter = reporter
        self._distributed = context.distributed
        self._callbacks = CallbackList(trial.build_callbacks())

        # Data
        self._batch_iterator = make_training_iterator(trial, context)
        epoch_length = agree_on_epoch_length(self._batch_iterator, settings, context)
        self._schedule: Schedule = settings.schedule(epoch_length)
        context.begin_training(self._schedule.epoch_length)
        self._validator = Validator(
            trial,
            context,
            self._callbacks,
            one_batch=settings.test_mode,
            stop_reason=self._stop_signals.interrupt_reason,
        )
        self._checkpoints = CheckpointManager(trial, context, self._callbacks, reporter)

        # Batches completed, and the batch after which each action ran last
        self.steps = 0
        self._reported_at = 0
        self._validated_at = -1
        self._checkpointed_at = -1
        self._best: float | None = None
        self._saved_random_state: dict[str, Any] | None = None

        # Reports, and the batch of the next agreement; no effect on results
        self._next_agreement = 1
        self._timings: LoopTimings | None = None
        if settings.profiling.enabled:
            self._timings = LoopTimings(settings.profiling, context.device)
        self._recorder = Recorder(context, self._callbacks, self._timings, reporter)
        self._machines: MachineMetrics | None = None

        # One batch
        self._batch_checks = BatchChecks(context, self._batch_iterator)
        self._argument_check = IteratorArgumentCheck(trial.train_batch)
        without_data = isinstance(self._batch_iterator, EmptyBatchIterator)
        self._loader_check = MissingLoaderCheck(
            "build_training_data_loader",
            missing=without_data and context.mpu.should_build_data_loader,
        )
        self._skipped_steps = SkippedStepMonitor(context.engines)

    def show_progress(self) -> Console:
        """Log reports through a console and return it; for a script without a platform."""
        run_dir = Path(self._context.spec.run_dir)
        self._recorder.console = Console(run_dir, self._schedule.max_steps)
        return self._recorder.console

    def record_history(self) -> None:
        """Store reported metrics for :meth:`result`."""
        self._recorder.history = History()

    def result(self, stop_reason: StopReason) -> FitResult:
        """Return what a script gets from its fit.

        Args:
            stop_reason: From :meth:`run`.
        """
        history = self._recorder.history or History()
        return FitResult(
            stop_reason,
            steps_completed=self.steps,
            max_steps=self._schedule.max_steps,
            history=history,
            checkpoints=with_metrics(self._checkpoints.saved, history),
            run_dir=Path(self._context.spec.run_dir),
            metric=self._settings.metric,
            smaller_is_better=self._settings.smaller_is_better,
        )

    def run(self) -> StopReason:
        """Train to the end, or until a stop is requested. **Collective**.

        Returns:
            Why the loop ended.
        """
        spec = self._context.spec
        ref = spec.latest_checkpoint
        with ExitStack() as closing:
            first = ref.steps_completed if ref is not None else 0
            closing.callback(self._callbacks.call, "on_trial_shutdown")
            self._callbacks.call("on_trial_startup", first, ref.uuid if ref is not None else None)
            self._machines = MachineMetrics(self._distributed)
            closing.callback(self._machines.close)
            closing.enter_context(self._checkpoints.sweep_unfinished())
            if ref is not None:
                self._recorder.report_state("restoring")
                self._restore(self._checkpoints.load(ref))
            self._recorder.begin(self.steps)
            for model in self._context.models:
                model.train()
            self._callbacks.call("on_training_start")
            if self._context.profiler is not None:
                closing.enter_context(self._context.profiler)
            self._seed()
            try:
                return self._loop()
            except ValidationInterruptedError as interruption:
                return self._save_and_stop(StopReason(interruption.stop_reason))

    # The loop

    def _loop(self) -> StopReason:
        if self._settings.initial_validation and self.steps == 0 and self._validated_at < 0:
            self._validate()
        self._run_due_actions()
        self._recorder.report_state("training")
        while True:
            stop_reason = self._train_to_limit()
            if stop_reason is not None:
                return self._save_and_stop(stop_reason)
            stop_reason = self._agree(last=True)
            if not self._schedule.pauses:
                return StopReason.FINISHED
            if stop_reason is not None or not self._extend_length():
                logger.info("pausing after batch %d: the searcher's limit", self.steps)
                return StopReason.REACHED

    def _train_to_limit(self) -> StopReason | None:
        """Train to the limit of this run; return the reason if the ranks agree to stop earlier."""
        while not self._schedule.finished(self.steps):
            self._train_until(min(self._schedule.next_pause(self.steps), self._next_agreement))
            self._report_if_due()
            if self.steps >= self._next_agreement:
                stop_reason = self._agree()
                if stop_reason is not None:
                    return stop_reason
            self._run_due_actions()
        return None

    def _extend_length(self) -> bool:
        """Ask the searcher for a greater length; return whether the run may train on.

        A run that continues at once keeps its slots and its processes.
        """
        until, length = self._settings.until, self._schedule.epoch_length
        if until is None or not isinstance(until.value, int):
            return False
        extension: Extension | None = None
        if self._reporter is not None:
            extension = request_extension(self._context.spec, self._reporter, until.value)
        extension = self._distributed.broadcast(extension, "agreeing to train beyond the limit")
        if extension is None or not extension.goes_on:
            return False
        limit = None if extension.until is None else type(until)(extension.until)
        self._settings = replace(self._settings, until=limit)
        self._schedule = self._settings.schedule(length)
        logger.info("the searcher extended the run to batch %d", self._schedule.end)
        return True

    def _train_until(self, stop: int) -> None:
        """Train until ``stop`` batches are complete, within one epoch.

        Reports that are due before ``stop`` are made here; what is due at ``stop`` is not.
        """
        # Local names keep the overhead per batch low; benchmarks/controller.py measures it.
        schedule, context, recorder = self._schedule, self._context, self._recorder
        add, train_batch, batches = (
            recorder.unreported.add,
            self._trial.train_batch,
            self._batches(),
        )
        if self._loader_check.active or self._argument_check.active:
            train_batch = self._checked_train_batch
        context.set_default_data(batches)
        profiler, timings, skipped_step_checks = (
            context.profiler,
            self._timings,
            self._skipped_steps.checks,
        )
        first = step = self.steps
        epoch = schedule.epoch(step)
        calls = range(self._batch_checks.calls_per_batch)
        report_at = schedule.report.next_after(step)
        self._batch_checks.begin()
        if schedule.epoch_ends(step) or step == 0:
            self._callbacks.call("on_training_epoch_start", epoch)
        started = time.perf_counter()
        while step < stop:
            context.enter_batch(step)
            if timings is not None:
                timings.begin(step)
            for _ in calls:
                add(step + 1, train_batch(batches, epoch, step))
            step += 1
            self.steps = step
            for check in skipped_step_checks:
                check(step)
            if timings is not None:
                timings.end()
            if profiler is not None:
                profiler.step()
            if step == report_at and step < stop:
                recorder.trained_s += time.perf_counter() - started
                recorder.report_training(step, schedule.max_steps)
                self._reported_at = step
                report_at = schedule.report.next_after(step)
                started = time.perf_counter()
        recorder.trained_s += time.perf_counter() - started
        self._batch_checks.end(stop - first)
        if schedule.epoch_ends(step):
            self._callbacks.call("on_training_epoch_end", epoch)

    def _checked_train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        with self._loader_check, self._argument_check:
            return self._trial.train_batch(dataloader_iter, epoch_idx, batch_idx)

    def _run_due_actions(self) -> None:
        """Report, validate and checkpoint if due after this batch and not done yet."""
        self._report_if_due()
        schedule, steps = self._schedule, self.steps
        if schedule.validation_due(steps) and self._validated_at != steps:
            self._validate()
        if schedule.checkpoint_due(steps) and self._checkpointed_at != steps:
            self._checkpoint()

    def _save_and_stop(self, stop_reason: StopReason) -> StopReason:
        if stop_reason is StopReason.STALE:
            logger.warning("stopping: another run has superseded this one")
            return stop_reason
        seconds = self._stop_signals.seconds_left
        limit = f", {seconds:.0f} s left" if seconds is not None else ""
        cause = self._stop_signals.cause or stop_reason.name.lower().replace("_", " ")
        logger.info("stopping after batch %d (%s)%s", self.steps, cause, limit)
        if self._checkpointed_at != self.steps:
            self._checkpoint()
        self._checkpoints.finish()
        return stop_reason

    # Agreement

    def _agree(self, *, last: bool = False) -> StopReason | None:
        """Agree whether to continue, and when to agree next. **Collective**.

        All that ranks exchange while training goes into this one all-gather: stop requests, speed,
        machine metrics, and whether the pending checkpoint can advance. One exchange a second costs
        nothing; one a batch would.

        Args:
            last: Training is complete; flush the pending checkpoint and the last samples.

        Returns:
            The reason to stop with the highest priority; None to continue.
        """
        if last:
            self._checkpoints.finish()
        self._recorder.report_speed(self.steps, self._schedule.max_steps)
        sample = self._machines.take(now=last) if self._machines is not None else None
        early = self._settings.early_reports and self.steps < _EARLY_BATCHES and not last
        overdue = early and self._recorder.is_overdue()
        local = (
            int(self._stop_signals.current() or 0),
            self._recorder.batch_s,
            sample,
            self._checkpoints.ready,
            overdue,
        )
        operation = f"agreeing to continue after batch {self.steps}"
        per_rank = self._distributed.allgather(local, operation)
        stop_reasons, batch_seconds, samples, ready, overdue_ranks = zip(*per_rank, strict=True)
        if any(overdue_ranks):
            self._recorder.report_preview(self.steps)
        if all(ready):
            self._checkpoints.advance()
        if self._machines is not None:
            self._recorder.report_machines(self.steps, self._machines.named(samples))
        # The slowest rank decides, so that all ranks choose the same batch.
        batches = int(_AGREEMENT_INTERVAL_S / max((*batch_seconds, 1e-9)))
        self._next_agreement = self.steps + min(max(1, batches), _MAX_AGREEMENT_BATCHES)
        return StopReason(max(stop_reasons)) if any(stop_reasons) else None

    # What is due

    def _report_if_due(self) -> None:
        if self._schedule.report_due(self.steps) and self._reported_at != self.steps:
            self._recorder.report_training(self.steps, self._schedule.max_steps)
            self._reported_at = self.steps

    def _validate(self) -> None:
        self._recorder.report_state("validating", self.steps / self._schedule.max_steps)
        metrics = self._validator.run()
        first, self._validated_at = self._validated_at < 0, self.steps
        value = metrics.get(self._settings.metric or "")
        improved = self._settings.improves(value, self._best)
        if improved:
            self._best = value
        length = self._schedule.epoch_length
        self._recorder.report_validation(
            self.steps, self.steps / length if length else None, metrics
        )
        if self.steps > 0:
            self._step_plateaus(value if self._settings.metric else _only_value(metrics))
        if self._settings.metric and value is None:
            self._report_missing_metric(self._settings.metric, metrics, first=first)
        policy = self._settings.checkpoint_policy
        save = policy == "all" or (policy == "best" and (improved or not self._settings.metric))
        if save and self.steps > 0 and self._checkpointed_at != self.steps:
            self._checkpoint()
        self._recorder.report_state("training")

    def _step_plateaus(self, value: float | None) -> None:
        """Step the LR schedules that follow the validation metric."""
        for engine in self._context.models:
            schedule = getattr(engine, "lr_scheduler", None)
            if isinstance(schedule, ReduceLROnPlateau) and value is not None:
                schedule.step(value)

    def _report_missing_metric(
        self, metric: str, metrics: dict[str, float], *, first: bool
    ) -> None:
        """Warn that a validation lacks the searcher's metric.

        Raises:
            TrialError: If it is the first validation: the search could never compare trials.
        """
        names = ", ".join(sorted(metrics)) or "none"
        text = (
            f"searcher.metric: must be one of the validation metrics, got {metric!r}; "
            f"there are: {names}"
        )
        if not self._validator.has_loader:
            text += "; build_validation_data_loader: must return a DataLoader, got None; add return"
        elif not metrics:
            text += (
                "; the validation returned no metrics: check that its loader yields batches and "
                "that evaluate_batch returns a dict with the metric"
            )
        if first:
            raise TrialError(text)
        logger.warning(text)

    def _checkpoint(self) -> None:
        self._recorder.report_state("checkpointing", self.steps / self._schedule.max_steps)
        before, self._checkpointed_at = self._checkpointed_at, self.steps
        try:
            self._checkpoints.save(self._state_to_save())
        except BaseException:
            self._checkpointed_at = before
            raise
        self._recorder.report_state("training")

    # State

    def _state_to_save(self) -> dict[str, Any]:
        return {
            "trial_id": self._context.spec.trial_id,
            "world_size": self._distributed.size,
            "steps_completed": self.steps,
            "reported_at": self._reported_at,
            "validated_at": self._validated_at,
            "checkpointed_at": self._checkpointed_at,
            "best": self._best,
            "window": self._recorder.unreported.state(),
            "feed": self._batch_iterator.state(),
            "random": random_state.capture(),
        }

    def _restore(self, saved: SavedState) -> None:
        if self._context.warm_start:
            logger.info("warm start: loaded the weights of trial %s", saved.shared["trial_id"])
            return
        shared = saved.shared
        self.steps = shared["steps_completed"]
        self._next_agreement = self.steps + 1
        self._reported_at = shared["reported_at"]
        self._validated_at = shared["validated_at"]
        self._checkpointed_at = self.steps
        self._best = shared["best"]
        entries: list[Entry] = list(saved.rank_state["window"]) if saved.rank_state else []
        if self._distributed.is_chief:
            for removed in saved.load_removed_ranks(self._distributed.size):
                entries += removed["window"]
        self._recorder.unreported.restore(entries)
        rank_state = saved.rank_state if saved.rank_state is not None else shared
        # An inner pipeline stage reads no data. After a change of the mesh its rank may read some.
        read_none = rank_state["feed"]["kind"] == "empty"
        self._batch_iterator.restore((shared if read_none else rank_state)["feed"])
        if saved.rank_state is not None and saved.world_size == self._distributed.size:
            self._saved_random_state = saved.rank_state["random"]
        logger.info("resumed after batch %d", self.steps)

    def _seed(self) -> None:
        """Restore the saved random state, or seed from the trial's seed, rank and batch."""
        if self._saved_random_state is not None:
            random_state.restore(self._saved_random_state)
            return
        rank = self._context.mpu.data_parallel_rank
        random_state.seed_everything(derive_seed(self._context.get_trial_seed(), rank, self.steps))

    # Helpers

    def _batches(self) -> Iterator[Any] | None:
        if isinstance(self._batch_iterator, EmptyBatchIterator):
            return None
        batches = self._context.engines[0].timed_input(self._batch_iterator)
        return batches if self._timings is None else self._timings.wrap(batches)


def make_training_iterator(trial: ZeroTrial, context: ZeroTrialContext) -> BatchIterator:
    """Build the trial's loader, and an endless iterator over it.

    Ranks that read no data get an iterator that raises.

    Raises:
        TrialError: If the loader is invalid.
    """
    if not context.mpu.should_build_data_loader:
        return EmptyBatchIterator()
    loader = trial.build_training_data_loader()
    if loader is None:
        return EmptyBatchIterator()
    return make_batch_iterator(
        loader,
        seed=context.get_trial_seed(),
        rank=context.mpu.data_parallel_rank,
        replicas=context.mpu.data_parallel_world_size,
        accumulation=context.get_num_micro_batches_per_slot(),
        checked=context.dataset_checks,
        micro_batch=context.get_train_micro_batch_size_per_gpu(),
    )


def agree_on_epoch_length(
    batches: BatchIterator, settings: FitSettings, context: ZeroTrialContext
) -> int | None:
    """Return the batches of an epoch; None if no rank knows. **Collective**."""
    lengths: list[int | None] = context.distributed.allgather(
        batches.batches_per_epoch, "agreeing on the length of an epoch"
    )
    with_length = [length for length in lengths if length is not None]
    if with_length:
        return min(with_length)
    records = settings.records_per_epoch
    return max(1, records // context.get_global_batch_size()) if records else None
