"""Whether a trial's ``train_batch`` trains, and draws, as much as a batch is."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from zerolab.errors import TrialError
from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import Feed

__all__ = ["BatchChecks", "GivenAnIterator"]

logger = logging.getLogger(__name__)


class GivenAnIterator:
    """Says that a method is given an iterator, where it fails and was written for a batch.

    Only until it has come to its end once: then it was not. It is the context of each call.

    Args:
        method: ``train_batch`` or ``evaluate_batch``; what it was written for is told by the name
            of its first argument.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._name = method.__name__
        self._doubted = next(iter(inspect.signature(method).parameters), "") == "batch"

    def __enter__(self) -> None:
        """Begin a call."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End a call.

        Raises:
            TrialError: In place of what failed.
        """
        mistaken = isinstance(error, AttributeError | KeyError | TypeError | ValueError)
        if self._doubted and mistaken:
            raise TrialError(
                f"{self._name}: its first argument is an iterator, not a batch; take one with "
                f"next(dataloader_iter) ({type(error).__name__}: {error})"
            ) from error
        self._doubted = self._doubted and error is not None


class BatchChecks:
    """Compares what some batches have counted with what was due.

    Args:
        context: Of the trial, with its engines.
        feed: From which it draws micro-batches.
    """

    def __init__(self, context: ZeroTrialContext, feed: Feed) -> None:
        self._first = context.engines[0]
        self._feed = feed
        self._pipeline = context.use_pipeline_parallel
        self._manual = self._pipeline or not context.auto_grad_accumulation
        self._accumulation = context.get_num_micro_batches_per_slot()
        self._first.check_calls(once_a_batch=self._manual)
        self.calls_per_batch = 1 if self._manual else self._accumulation
        """Of ``train_batch``."""
        self._said_drawn = False
        self._trained_before: int | None = None
        self._drawn_before = 0

    def begin(self) -> None:
        """Begin to count."""
        self._trained_before, self._drawn_before = self._micro_steps(), self._feed.drawn

    def end(self, batches: int) -> None:
        """Compare what was counted since :meth:`begin`.

        Args:
            batches: That were trained.

        Raises:
            TrialError: If more or fewer micro-batches were trained than they have.
        """
        self._check_micro_steps(self._trained_before, batches)
        self._check_drawn(self._feed.drawn - self._drawn_before, batches)

    def _micro_steps(self) -> int | None:
        return None if self._pipeline else self._first.micro_steps

    def _check_micro_steps(self, before: int | None, batches: int) -> None:
        after = self._micro_steps()
        if before is None or after is None:
            return
        trained, due = after - before, batches * self._accumulation
        if trained == due or (self._manual and trained and trained % due == 0):
            return
        found = f"the first engine trained {trained} in {batches} batch(es) instead of {due}"
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
            f"(gradient_accumulation_steps): {found}; {remedy}"
        )

    def _check_drawn(self, drawn: int, batches: int) -> None:
        """Say once when the trial draws more than it trains: an epoch then skips data."""
        due = batches * self._accumulation
        if drawn <= due or self._said_drawn:
            return
        self._said_drawn = True
        logger.warning(
            "train_batch drew %d micro-batches in %d batch(es), where %d are trained: an epoch is "
            "over before its samples are; call next(dataloader_iter) once for each engine.step()",
            drawn,
            batches,
            due,
        )
