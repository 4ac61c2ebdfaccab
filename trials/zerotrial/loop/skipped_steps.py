"""Detection of trials in which every optimizer step is skipped."""

from collections.abc import Sequence

from zerolab.errors import TrialError
from zerotrial.engine_view import EngineView

__all__ = ["SkippedStepMonitor"]

_MAX_SKIPPED_BATCHES = 50
"""Consecutive batches; a loss scale that starts far too high recovers within fewer."""


class SkippedStepMonitor:
    """Monitor that fails a trial whose engines no longer update their weights.

    Engines without a count of skipped steps are ignored.

    Args:
        engines: Engines of the trial.
    """

    def __init__(self, engines: Sequence[EngineView]) -> None:
        self.checks = [
            _EngineMonitor(index, engine).check
            for index, engine in enumerate(engines)
            if engine.skipped_steps is not None
        ]
        """A function for each engine; call it after each batch."""


class _EngineMonitor:
    def __init__(self, index: int, engine: EngineView) -> None:
        self._index = index
        self._engine = engine
        self._counters = engine.counters
        self._skipped = engine.skipped_steps
        self._since: int | None = None  # batches completed before the skipped ones

    def check(self, batch: int) -> None:
        """Check the engine after a batch.

        Args:
            batch: Batches completed.

        Raises:
            TrialError: If the engine skipped every step of the last 50 batches.
        """
        previous, self._skipped = self._skipped, self._counters.skipped_steps
        if self._skipped == previous:
            self._since = None
        elif self._since is None:
            self._since = batch - 1
        elif batch - self._since >= _MAX_SKIPPED_BATCHES:
            scale = self._engine.numbers().get("loss_scale")
            count = batch - self._since
            raise TrialError(
                f"engine {self._index}: every step of the last {count} batches was "
                f"skipped, for its gradients are not finite (loss scale {scale}): nothing is "
                f"learned since batch {self._since}. Check the loss for NaN, or lower the "
                "learning rate; with fp16, try bf16 instead"
            )
