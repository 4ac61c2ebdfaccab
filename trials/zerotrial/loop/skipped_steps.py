"""Notices a trial that computes and learns nothing: every step is skipped."""

from collections.abc import Sequence

from zerolab.errors import TrialError
from zerotrial.compat.engine_view import EngineView

__all__ = ["SkippedSteps"]

_MOST = 50
"""Batches in a row; a loss scale that begins far too high is found within fewer."""


class SkippedSteps:
    """Counts for how many batches each engine has not changed its weights.

    Engines that do not count skipped steps are left alone.

    Args:
        engines: Of the trial.
    """

    def __init__(self, engines: Sequence[EngineView]) -> None:
        self._watched = [
            _Watched(number, engine)
            for number, engine in enumerate(engines)
            if engine.skipped_steps is not None
        ]

    def look(self, batch: int) -> None:
        """Look at the engines after a batch.

        Args:
            batch: How many batches are complete.

        Raises:
            TrialError: If an engine has skipped every step of the last 50 batches.
        """
        for one in self._watched:
            one.look(batch)


class _Watched:
    def __init__(self, number: int, engine: EngineView) -> None:
        self._number = number
        self._engine = engine
        self._skipped = engine.skipped_steps
        self._first: int | None = None  # batch before which the steps skipped in a row began

    def look(self, batch: int) -> None:
        before, self._skipped = self._skipped, self._engine.skipped_steps
        if self._skipped == before:
            self._first = None
        elif self._first is None:
            self._first = batch - 1
        elif batch - self._first >= _MOST:
            scale = self._engine.numbers().get("loss_scale")
            raise TrialError(
                f"engine {self._number}: every step of the last {batch - self._first} batches was "
                f"skipped, for its gradients are not finite (loss scale {scale}): nothing is "
                f"learned since batch {self._first}. Look at the loss for NaN, or lower the "
                "learning rate; where fp16 is on, bf16 may do in its place"
            )
