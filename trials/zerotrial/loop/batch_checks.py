"""Checks of ``train_batch``: it trains and draws one batch, and steps are not all skipped."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from zerolab.errors import TrialError
from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import BatchIterator
from zerotrial.engine_view import EngineView

__all__ = ["BatchChecks", "IteratorArgumentCheck", "MissingLoaderCheck", "SkippedStepMonitor"]

logger = logging.getLogger(__name__)

_MAX_SKIPPED_BATCHES = 50
"""Consecutive batches; a loss scale that starts far too high recovers within fewer."""


class IteratorArgumentCheck:
    """Context manager that explains the failure of a method written for a batch.

    Determined passes an iterator where other libraries pass a batch. A method whose first parameter
    is called ``batch`` probably expects the latter. After one successful call the check is off.

    Args:
        method: ``train_batch`` or ``evaluate_batch``.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._name = method.__name__
        self.active = next(iter(inspect.signature(method).parameters), "") == "batch"
        """Whether a failure would be explained."""

    def __enter__(self) -> None:
        """Enter a call."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave a call.

        Raises:
            TrialError: Raised instead of the method's error.
        """
        looks_misused = isinstance(error, AttributeError | KeyError | TypeError | ValueError)
        if self.active and looks_misused:
            raise TrialError(
                f"{self._name}: its first argument is an iterator, not a batch; take one with "
                f"next(dataloader_iter) ({type(error).__name__}: {error})"
            ) from error
        self.active = self.active and error is not None


class MissingLoaderCheck:
    """Context manager that explains the failure of a method that got None as data.

    A trial may return None for a loader that it does not use; one that uses it has forgotten its
    ``return``.

    Args:
        loader_method: Method that should have returned the loader.
        missing: Whether it returned None.
    """

    def __init__(self, loader_method: str, *, missing: bool) -> None:
        self._loader_method = loader_method
        self.active = missing
        """Whether a failure would be explained."""

    def __enter__(self) -> None:
        """Enter a call."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave a call.

        Raises:
            TrialError: Raised instead of the method's error.
        """
        used = isinstance(error, TypeError | AttributeError) and "'NoneType' object" in str(error)
        if self.active and used:
            raise TrialError(
                f"{self._loader_method}: must return a DataLoader, got None; add return"
            ) from error


class BatchChecks:
    """Compares the micro-batches trained and drawn with the expected number."""

    def __init__(self, context: ZeroTrialContext, batches: BatchIterator) -> None:
        self._first = context.engines[0]
        self._batches = batches
        self._pipeline = context.use_pipeline_parallel
        self._manual = self._pipeline or not context.auto_grad_accumulation
        self._accumulation = context.get_num_micro_batches_per_slot()
        self._first.check_calls(once_a_batch=self._manual)
        self.calls_per_batch = 1 if self._manual else self._accumulation
        """Calls of ``train_batch`` in one batch."""
        self._warned_overdraw = False
        self._trained_before: int | None = None
        self._drawn_before = 0

    def begin(self) -> None:
        """Start counting."""
        self._trained_before, self._drawn_before = self._micro_steps(), self._batches.drawn

    def end(self, batches: int) -> None:
        """Check the counts since :meth:`begin`.

        Args:
            batches: Batches trained since then.

        Raises:
            TrialError: If more or fewer micro-batches were trained than these batches have.
        """
        self._check_micro_steps(self._trained_before, batches)
        self._check_drawn(self._batches.drawn - self._drawn_before, batches)

    def _micro_steps(self) -> int | None:
        return None if self._pipeline else self._first.micro_steps

    def _check_micro_steps(self, before: int | None, batches: int) -> None:
        after = self._micro_steps()
        if before is None or after is None:
            return
        trained, due = after - before, batches * self._accumulation
        if trained == due or (self._manual and trained and trained % due == 0):
            return
        problem = f"the first engine trained {trained} in {batches} batch(es) instead of {due}"
        if self._manual:
            remedy = (
                f"it is called once a batch: loop over {self._accumulation} micro-batches in it, "
                "with engine.backward(loss) and engine.step() for each"
            )
        else:
            remedy = (
                f"it is called {self._accumulation} time(s) a batch: call engine.backward(loss) "
                "and engine.step() once in each call, or call "
                "context.disable_auto_grad_accumulation() and loop over the micro-batches"
            )
        raise TrialError(
            f"train_batch: must train {self._accumulation} micro-batch(es) a batch "
            f"(gradient_accumulation_steps): {problem}; {remedy}"
        )

    def _check_drawn(self, drawn: int, batches: int) -> None:
        """Warn once if the trial draws more than it trains; an epoch then skips data."""
        due = batches * self._accumulation
        if drawn <= due or self._warned_overdraw:
            return
        self._warned_overdraw = True
        logger.warning(
            "train_batch drew %d micro-batches in %d batch(es), but trained %d: an epoch trains "
            "only some of its samples; call next(dataloader_iter) once for each engine.step()",
            drawn,
            batches,
            due,
        )


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
