"""Reports of a trial: training and validation metrics, speed, machine metrics and state.

Every rank has a recorder, since averages need all ranks. Only the chief's sends reports.
"""

import logging

from zerolab.reports.reporter import Reporter
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.console import Console
from zerotrial.loop.fit_result import History
from zerotrial.loop.metrics import Entry, UnreportedMetrics, average_by_batch, to_numbers
from zerotrial.loop.profiling import LoopTimings

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

_MAX_REPORT_INTERVAL_S = 5.0
"""Longest interval between reports of the first batches, in seconds of training."""
_MIN_SPEED_INTERVAL_S = 0.2
"""Shortest interval between measurements of the speed, in seconds of training."""


class Recorder:
    """Collector and sender of a run's reports.

    Args:
        context: The trial's context, with engines wrapped.
        callbacks: Called with averaged training metrics.
        timings: Timings of the loop, if profiling is enabled.
        reporter: The run's reporter; ``None`` on all ranks but the chief.
    """

    def __init__(
        self,
        context: ZeroTrialContext,
        callbacks: CallbackList,
        timings: LoopTimings | None,
        reporter: Reporter | None,
    ) -> None:
        self.unreported = UnreportedMetrics()
        """Outputs of ``train_batch`` since the last report."""
        self.trained_s = 0.0
        """Seconds of training in this run, without validations and checkpoints."""
        self.console: Console | None = None
        """Progress output of a script without a platform."""
        self.history: History | None = None
        """Reported metrics, of a script that gets them as a result; the same on all ranks."""
        self.batch_s = 0.0
        """Seconds of training in one batch, at the last measurement."""
        self._context = context
        self._distributed = context.distributed
        self._callbacks = callbacks
        self._timings = timings
        self._reporter = reporter
        self._engines = context.engines
        self._measured_s, self._measured_steps = 0.0, 0
        self._reported_s = 0.0

    def begin(self, steps: int) -> None:
        """Start measuring after ``steps`` batches."""
        self._measured_steps = steps
        if self.console is not None:
            self.console.begin(steps)

    def report_training(self, steps: int, total_steps: int) -> None:
        """Average training metrics over batches and ranks, and report them. **Collective**.

        Args:
            steps: Batches completed.
            total_steps: Total number of batches to train.
        """
        entries = self._gather_entries(steps)
        self.unreported.clear()
        self._reported_s = self.trained_s
        averages, batches = average_by_batch(entries)
        reducers = self._context.reducers
        if reducers.active(training=True):
            averages |= to_numbers(reducers.reduce(self._distributed, training=True))
            reducers.reset(training=True)
        if len(self._callbacks):
            self._callbacks.call("on_training_workload_end", averages, batches)
        if self._reporter is not None or self.history is not None:
            metrics = self._engine_metrics() | averages  # users' names take precedence
            if self.history is not None:
                self.history.add("training", steps, metrics)
            if self._reporter is not None:
                self._reporter.report_metrics("training", steps, metrics)
                self._context.log_to_tensorboard("training", steps, metrics)
        if self.console is not None:
            self.console.training(steps, averages)
        if self.trained_s - self._measured_s >= _MIN_SPEED_INTERVAL_S:
            self.report_speed(steps, total_steps)

    def is_overdue(self) -> bool:
        """Return whether the chief has reported no training metrics for 5 s of training."""
        reporting = self._reporter is not None and len(self.unreported) > 0
        return reporting and self.trained_s - self._reported_s >= _MAX_REPORT_INTERVAL_S

    def report_preview(self, steps: int) -> None:
        """Report the averages since the last report, and keep the entries. **Collective**.

        The entries stay for the next regular report, so that its averages do not depend on timing.
        """
        entries = self._gather_entries(steps)
        self._reported_s = self.trained_s
        if self._reporter is not None and entries:
            averages, _ = average_by_batch(entries)
            self._reporter.report_metrics("training", steps, averages)
            self._context.log_to_tensorboard("training", steps, averages)
            if self.console is not None:
                self.console.training(steps, averages)

    def _gather_entries(self, steps: int) -> list[Entry]:
        """Gather the unreported entries of all ranks. **Collective**."""
        entries = self.unreported.entries() if self._context.mpu.should_report_metrics else []
        if self._distributed.size == 1:
            return entries
        operation = f"reducing training metrics after batch {steps}"
        gathered = self._distributed.allgather(entries, operation)
        return [entry for rank_entries in gathered for entry in rank_entries]

    def report_speed(self, steps: int, total_steps: int) -> None:
        """Report the progress, and the speed since the last call."""
        seconds, batches = self.trained_s - self._measured_s, steps - self._measured_steps
        self._measured_s, self._measured_steps = self.trained_s, steps
        if batches:
            self.batch_s = seconds / batches
        if self._reporter is None:
            return
        self._reporter.report_progress(steps / total_steps)
        if batches and seconds > 0:
            rate = batches / seconds
            speed = {
                "batches_per_second": rate,
                "samples_per_second": rate * self._context.get_global_batch_size(),
            }
            if self._timings is not None:
                speed |= self._timings.pop_means()
            self._reporter.report_metrics("system", steps, speed)
            if self.console is not None:
                self.console.advance(steps, speed["samples_per_second"])

    def report_validation(
        self, steps: int, epochs: float | None, metrics: dict[str, float]
    ) -> None:
        """Report validation metrics, with the batches and epochs that searchers compare."""
        if self.history is not None:
            self.history.add("validation", steps, metrics)
        if self._reporter is None:
            return
        lengths = {"batches": float(steps)}
        if epochs is not None:
            lengths["epochs"] = epochs
        self._reporter.report_metrics("validation", steps, lengths | metrics)
        self._context.log_to_tensorboard("validation", steps, metrics)
        values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        logger.info("validation after batch %d: %s", steps, values or "no metrics")
        if self.console is not None:
            self.console.validation(steps, metrics)

    def report_machines(self, steps: int, measured: dict[str, float]) -> None:
        """Report the metrics of the machines, if there are new ones."""
        if measured and self._reporter is not None:
            self._reporter.report_metrics("system", steps, measured)

    def report_state(self, state: str, progress: float | None = None) -> None:
        """Report the state of the run, with the progress at which it enters that state."""
        if self._reporter is not None:
            if progress is not None:
                self._reporter.report_progress(progress)
            self._reporter.report_state(state)

    def _engine_metrics(self) -> dict[str, float]:
        numbers = self._engines[0].numbers()
        for index, engine in enumerate(self._engines[1:], start=1):
            numbers |= {f"{name}_{index}": value for name, value in engine.numbers().items()}
        return numbers
