"""What a trial reports: training and validation metrics, speed, the machines, and its state.

Every rank has a recorder, for averages need all of them; the chief's sends.
"""

import logging

from zerolab.reports.reporter import Reporter
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.console import Console
from zerotrial.loop.metrics import Entry, UnreportedMetrics, average_by_batch, to_numbers
from zerotrial.loop.profiling import LoopTimings

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 5.0
"""How often the first batches are reported at least; seconds of training."""
_SPEED_EVERY_S = 0.2
"""How often the speed is measured at most; seconds of training."""


class Recorder:
    """Collects what a run has to say.

    Args:
        context: Of the trial, with engines wrapped.
        callbacks: Told of averaged training metrics.
        timings: Of the loop, where the configuration asks for them.
        reporter: Of the run; ``None`` on all ranks but the chief.
    """

    def __init__(
        self,
        context: ZeroTrialContext,
        callbacks: CallbackList,
        timings: LoopTimings,
        reporter: Reporter | None,
    ) -> None:
        self.unreported = UnreportedMetrics()
        """What ``train_batch`` returned since the last report."""
        self.trained_s = 0.0
        """Seconds of training in this run, without validations and checkpoints."""
        self.console: Console | None = None
        """Told as well, where a script runs without a platform."""
        self.batch_s = 0.0
        """Seconds of training in one batch, when it was last measured."""
        self._context = context
        self._distributed = context.distributed
        self._callbacks = callbacks
        self._timings = timings
        self._reporter = reporter
        self._engines = context.engines
        self._measured_s, self._measured_steps = 0.0, 0
        self._reported_s = 0.0

    def begin(self, steps: int) -> None:
        """Measure from ``steps`` batches on."""
        self._measured_steps = steps
        if self.console is not None:
            self.console.begin(steps)

    def training(self, steps: int, of_steps: int) -> None:
        """Average training metrics over batches and ranks, and report them. **Collective**.

        Args:
            steps: Batches completed.
            of_steps: Batches to train in all.
        """
        entries = self._entries_of_all(steps)
        self.unreported.clear()
        self._reported_s = self.trained_s
        averages, batches = average_by_batch(entries)
        reducers = self._context.reducers
        if reducers.active(training=True):
            averages |= to_numbers(reducers.reduce(self._distributed, training=True))
            reducers.reset(training=True)
        if len(self._callbacks):
            self._callbacks.call("on_training_workload_end", averages, batches)
        if self._reporter is not None:
            metrics = self._engine_numbers() | averages  # the user's names win
            self._reporter.report_metrics("training", steps, metrics)
            self._context.log_to_tensorboard("training", steps, metrics)
        if self.console is not None:
            self.console.training(steps, averages)
        if self.trained_s - self._measured_s >= _SPEED_EVERY_S:
            self.speed(steps, of_steps)

    def is_overdue(self) -> bool:
        """Return whether the chief has reported no training metrics for 5 s of training."""
        reporting = self._reporter is not None and len(self.unreported) > 0
        return reporting and self.trained_s - self._reported_s >= _REPORT_EVERY_S

    def preview(self, steps: int) -> None:
        """Report the averages since the last report, which stay unreported. **Collective**.

        What the next report averages does not depend on the time that batches took.
        """
        entries = self._entries_of_all(steps)
        self._reported_s = self.trained_s
        if self._reporter is not None and entries:
            averages, _ = average_by_batch(entries)
            self._reporter.report_metrics("training", steps, averages)
            self._context.log_to_tensorboard("training", steps, averages)
            if self.console is not None:
                self.console.training(steps, averages)

    def _entries_of_all(self, steps: int) -> list[Entry]:
        """Gather what no rank has reported yet. **Collective**."""
        entries = self.unreported.entries() if self._context.mpu.should_report_metrics else []
        if self._distributed.size == 1:
            return entries
        operation = f"reducing training metrics after batch {steps}"
        gathered = self._distributed.allgather(entries, operation)
        return [entry for of_rank in gathered for entry in of_rank]

    def speed(self, steps: int, of_steps: int) -> None:
        """Measure how fast it went since the last call, and report it with the progress."""
        seconds, batches = self.trained_s - self._measured_s, steps - self._measured_steps
        self._measured_s, self._measured_steps = self.trained_s, steps
        if batches:
            self.batch_s = seconds / batches
        if self._reporter is None:
            return
        self._reporter.report_progress(steps / of_steps)
        if batches and seconds > 0:
            rate = batches / seconds
            speed = {
                "batches_per_second": rate,
                "samples_per_second": rate * self._context.get_global_batch_size(),
            }
            self._reporter.report_metrics("system", steps, speed | self._timings.take())
            if self.console is not None:
                self.console.speed(speed["samples_per_second"])

    def validation(self, steps: int, epochs: float | None, metrics: dict[str, float]) -> None:
        """Report validation metrics, with the lengths that searchers count in."""
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

    def machines(self, steps: int, measured: dict[str, float]) -> None:
        """Report what the machines did, if there is anything new."""
        if measured and self._reporter is not None:
            self._reporter.report_metrics("system", steps, measured)

    def state(self, state: str) -> None:
        """Report what the run is doing."""
        if self._reporter is not None:
            self._reporter.report_state(state)

    def _engine_numbers(self) -> dict[str, float]:
        numbers = self._engines[0].numbers()
        for index, engine in enumerate(self._engines[1:], start=1):
            numbers |= {f"{name}_{index}": value for name, value in engine.numbers().items()}
        return numbers
