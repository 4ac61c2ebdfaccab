"""Validation: one pass over the data on all ranks, and the reduction of its metrics."""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from zerolab.errors import TrialError
from zerolab.formatting import duration_text
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import check_loader, keeps_position, loader_length
from zerotrial.data.loader import DataLoader
from zerotrial.loop.batch_checks import IteratorArgumentCheck, MissingLoaderCheck
from zerotrial.loop.console import PROGRESS
from zerotrial.loop.metrics import to_numbers
from zerotrial.reducers import Reducer, error_context, reduce_values
from zerotrial.trial import ZeroTrial

__all__ = ["ValidationInterruptedError", "Validator"]

logger = logging.getLogger(__name__)

_MISSING = object()

_AGREEMENT_INTERVAL_S = 1.0
"""Approximate seconds of validation between two agreements of the ranks whether to continue."""
_MAX_AGREEMENT_CALLS = 10_000
_PROGRESS_INTERVAL_S = 60.0
"""Seconds between two messages about the progress of a validation."""


class ValidationInterruptedError(Exception):
    """A stop request interrupted a validation, whose results are dropped.

    Args:
        stop_reason: The largest of the ranks' stop reasons.
    """

    def __init__(self, stop_reason: int) -> None:
        super().__init__("a stop request interrupted the validation")
        self.stop_reason = stop_reason


class _ProgressLogger:
    """Logger of the progress of a validation, once a minute.

    Args:
        total: Batches of the loader; None if it has no length.
        started: Start of the validation, on the clock of ``time.monotonic``.
    """

    def __init__(self, total: int | None, started: float) -> None:
        self._total = total
        self._started = started
        self._due = started + _PROGRESS_INTERVAL_S

    def update(self, evaluated: int) -> None:
        """Log the progress if the interval has passed; cheap enough for each batch.

        Args:
            evaluated: Batches evaluated so far.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _PROGRESS_INTERVAL_S
        elapsed_s, total = now - self._started, self._total
        if total is None or evaluated > total:  # a user may make any number of passes
            batches, remaining = f"{evaluated:,} batches", ""
        else:
            batches = f"{evaluated:,} of {total:,} batches"
            remaining_s = elapsed_s / evaluated * (total - evaluated) if evaluated else 0.0
            remaining = f", about {duration_text(remaining_s)} left" if remaining_s else ""
        PROGRESS.info("validating: %s in %s%s", batches, duration_text(elapsed_s), remaining)


class _ValidationBatches:
    """Iterator over validation batches that looks ahead by one and counts samples."""

    def __init__(
        self,
        batches: Iterator[Any],
        limit: int | None,
        length: Callable[[Any], int],
        log_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._batches = batches
        self._limit = limit
        self._length = length
        self._log_progress = log_progress
        self._next_batch: Any = _MISSING
        self.drawn = 0
        self.samples = 0
        self.last: Any = _MISSING

    def has_more(self, count: int) -> bool:
        """Return whether a call that takes ``count`` micro-batches can be made."""
        if self._limit is not None and self.drawn + count > self._limit:
            return False
        if self._next_batch is _MISSING:
            self._next_batch = next(self._batches, _MISSING)
        return self._next_batch is not _MISSING

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._log_progress(self.drawn)
        batch, self._next_batch = self._next_batch, _MISSING
        if batch is _MISSING:
            batch = next(self._batches)
        self.drawn += 1
        self.last = batch
        try:
            self.samples += self._length(batch)
        except TypeError:
            self.samples += 1
        return batch


class _InterruptibleLoader:
    """Proxy of the loader for ``evaluate_full_dataset`` whose iteration can be interrupted.

    Args:
        loader: The user's loader.
        check_stop: Called before each batch with the number of batches so far; raises to stop.
        log_progress: Called likewise.
    """

    def __init__(
        self,
        loader: Any,
        check_stop: Callable[[int], None],
        log_progress: Callable[[int], None],
    ) -> None:
        self._loader = loader
        self._check_stop = check_stop
        self._log_progress = log_progress
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in _single_pass(self._loader):
            self._check_stop(self._drawn)
            self._log_progress(self._drawn)
            self._drawn += 1
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class Validator:
    """Validation loop of a trial; one object for all validations of a run.

    Args:
        trial: The user's trial.
        context: Its context, with engines wrapped.
        callbacks: Called at each step of a validation.
        one_batch: Evaluate a single batch, for test mode.
        stop_reason: Called between batches; a value other than 0 on any rank interrupts.

    Raises:
        TrialError: If the validation loader is invalid.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        callbacks: CallbackList,
        *,
        one_batch: bool = False,
        stop_reason: Callable[[], int] = lambda: 0,
    ) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._one_batch = one_batch
        self._current_stop_reason = stop_reason
        self._next_agreement = 1  # calls of evaluate_batch after which the ranks agree next
        self._uses_full_dataset = (
            type(trial).evaluate_full_dataset is not ZeroTrial.evaluate_full_dataset
        )
        self._with_index = _takes_batch_idx(trial.evaluate_batch)
        self._argument_check = IteratorArgumentCheck(trial.evaluate_batch)
        self._lockstep = context.distributed.size > 1 and any(
            engine.forward_is_collective for engine in context.engines
        )
        self._call_size = 1  # micro-batches that one call of evaluate_batch takes
        if context.use_pipeline_parallel:
            self._call_size = context.get_num_micro_batches_per_slot()
        self._loader: Any = None
        self._source: Any = None
        if context.mpu.should_build_data_loader:
            self._source = trial.build_validation_data_loader()
            self._loader = self._shard(self._source)
        missing = self._source is None
        sizes = context.distributed.allgather(
            (missing, None if missing else loader_length(self._source)),
            "counting validation batches",
        )
        lengths = [length for without_loader, length in sizes if not without_loader]
        self.has_loader = bool(lengths)
        """Whether ``build_validation_data_loader`` has given any rank a loader."""
        if lengths and all(length == 0 for length in lengths):
            raise TrialError(
                "build_validation_data_loader: must give at least one batch, got an empty loader; "
                "check the path and the filters of its data set, or return None to validate nothing"
            )

    def run(self) -> dict[str, float]:
        """Evaluate, and reduce over batches and ranks. **Collective**.

        Returns:
            The metrics, the same on every rank.

        Raises:
            ValidationInterruptedError: On all ranks, if any rank gets a stop request.
        """
        self._callbacks.call("on_validation_start")
        started = time.monotonic()
        context = self._context
        for model in context.models:
            model.eval()
        try:
            with context.reducers.validating(), torch.no_grad():
                if self._uses_full_dataset:
                    metrics = self._evaluate_full_dataset(started)
                else:
                    metrics = self._evaluate_batches(started)
                reduced = context.reducers.reduce(context.distributed, training=False)
        finally:
            for model in context.models:
                model.train()
        metrics |= to_numbers(reduced)
        self._callbacks.call("on_validation_end", metrics)
        return metrics

    def _evaluate_full_dataset(self, started: float) -> dict[str, float]:
        distributed, output, stop_reason = self._context.distributed, None, 0
        self._next_agreement = 1
        if distributed.is_chief or self._lockstep:
            data = self._source
            if hasattr(data, "__iter__"):
                progress = _ProgressLogger(loader_length(data), started)
                data = _InterruptibleLoader(
                    data, lambda drawn: self._check_stop(drawn, started), progress.update
                )
            try:
                with MissingLoaderCheck("build_validation_data_loader", missing=data is None):
                    output = self._trial.evaluate_full_dataset(data)
            except ValidationInterruptedError as interruption:
                stop_reason = interruption.stop_reason
        output, stop_reason = distributed.broadcast(
            (output, stop_reason), "sharing validation metrics"
        )
        if stop_reason:
            raise ValidationInterruptedError(stop_reason)
        return to_numbers(_check_output(output))

    def _check_stop(self, drawn: int, started: float) -> None:
        """Check for a stop request about once a second.

        **Collective** in lockstep: the forward passes are collective, so all ranks draw the same
        number of batches.

        Raises:
            ValidationInterruptedError: On a stop request; in lockstep on all ranks.
        """
        if drawn < self._next_agreement:
            return
        call_s = (time.monotonic() - started) / drawn
        if self._lockstep:
            self._agree(has_more=True, call_s=call_s)
        elif stop_reason := int(self._current_stop_reason()):
            raise ValidationInterruptedError(stop_reason)
        else:
            self._schedule_agreement(call_s)

    def _evaluate_batches(self, started: float) -> dict[str, float]:
        self._callbacks.call("on_validation_epoch_start")
        keep = self._callbacks.overrides("on_validation_epoch_end")
        outputs: list[Any] = []
        values: dict[str, list[float]] = {}
        batches = self._batches(started)
        calls = 0
        self._next_agreement = 1
        while self._has_more(batches, calls, started):
            if batches is not None and not batches.has_more(self._call_size):
                self._evaluate_spare_batch(batches, calls)
                continue
            output = self._evaluate(batches, calls)
            calls += 1
            if keep:
                outputs.append(output)
            for name, value in to_numbers(_check_output(output)).items():
                values.setdefault(name, []).append(value)
        self._callbacks.call("on_validation_epoch_end", outputs)
        samples = batches.samples if batches is not None else 0
        logger.info("validated %d samples in %.2f s", samples, time.monotonic() - started)
        return self._reduce(values if self._context.mpu.should_report_metrics else {})

    def _evaluate(self, batches: _ValidationBatches | None, calls: int) -> Any:
        before = batches.drawn if batches is not None else 0
        self._context.set_default_data(batches)
        try:
            with self._argument_check:
                if self._with_index:
                    output = self._trial.evaluate_batch(batches, calls)
                else:
                    output = self._trial.evaluate_batch(batches)
        except StopIteration:
            raise TrialError(
                f"evaluate_batch: must take {self._call_size} micro-batch(es) in one call with "
                "next(dataloader_iter), but requested more batches than exist"
            ) from None
        if batches is not None and batches.drawn == before and self._loader is not None:
            raise TrialError("evaluate_batch: must take its batch with next(dataloader_iter)")
        return output

    def _evaluate_spare_batch(self, batches: _ValidationBatches, calls: int) -> None:
        """Take part in a collective forward pass of other ranks, and drop the results.

        Forward passes of ZeRO stage 3, tensor parallelism and the like gather weights or
        activations from all ranks. A rank that has run out of data evaluates an old batch again.
        """
        spare = batches.last if batches.last is not _MISSING else next(iter(self._source), _MISSING)
        if spare is _MISSING:
            raise TrialError(
                "the validation data are empty on this rank; give it at least one batch"
            )
        with self._context.reducers.discarding():
            self._evaluate(
                _ValidationBatches(iter([spare] * self._call_size), None, lambda _: 0),
                calls,
            )

    def _has_more(self, batches: _ValidationBatches | None, calls: int, started: float) -> bool:
        """Return whether another call is due. **Collective**: all ranks finish together.

        In lockstep the ranks agree before each call. Otherwise they agree about once a second, and
        a rank without more batches waits for the others.

        Raises:
            ValidationInterruptedError: On all ranks, if any rank gets a stop request.
        """
        has_more = batches is not None and batches.has_more(self._call_size)
        # A rank with batches agrees once and evaluates the next one. A rank without batches repeats
        # the agreement until no rank has more, so that the others never wait for it.
        while not has_more or self._lockstep or calls >= self._next_agreement:
            call_s = (time.monotonic() - started) / max(calls, 1)
            any_more = self._agree(has_more=has_more, call_s=call_s)
            if has_more or self._lockstep or not any_more:
                return any_more
        return has_more

    def _agree(self, *, has_more: bool, call_s: float) -> bool:
        """Return whether any rank has more batches, and schedule the next agreement."""
        local = (has_more, int(self._current_stop_reason()), call_s)
        operation = "counting validation batches"
        more, stop_reasons, call_seconds = zip(
            *self._context.distributed.allgather(local, operation), strict=True
        )
        if any(stop_reasons):
            raise ValidationInterruptedError(max(stop_reasons))
        # The slowest rank decides, so that all ranks choose the same call.
        self._schedule_agreement(max(call_seconds))
        return any(more)

    def _schedule_agreement(self, call_s: float) -> None:
        calls = int(_AGREEMENT_INTERVAL_S / max(call_s, 1e-9))
        self._next_agreement += min(max(1, calls), _MAX_AGREEMENT_CALLS)

    def _batches(self, started: float) -> _ValidationBatches | None:
        if self._loader is None:
            return None
        limit = self._call_size if self._one_batch else None
        if limit is None and self._call_size > 1:
            calls, remainder = divmod(len(self._loader), self._call_size)
            if not calls:
                raise TrialError(
                    f"validation data: a pipeline evaluates {self._call_size} micro-batches at a "
                    f"time, and there are only {remainder}"
                )
            if remainder:
                logger.warning(
                    "%d validation micro-batches do not fill a batch: ignored", remainder
                )
            limit = calls * self._call_size
        total = loader_length(self._loader) if limit is None else limit
        return _ValidationBatches(
            _single_pass(self._loader),
            limit,
            self._trial.get_batch_length,
            _ProgressLogger(total, started).update,
        )

    def _shard(self, loader: Any) -> Any:
        if loader is None or self._uses_full_dataset:
            return loader
        mpu = self._context.mpu
        if isinstance(loader, DataLoader):
            return loader.validation_loader(
                seed=self._context.get_trial_seed(),
                rank=mpu.data_parallel_rank,
                replicas=mpu.data_parallel_world_size,
            )
        checked = self._context.dataset_checks and not keeps_position(loader)
        check_loader(loader, "build_validation_data_loader", checked=checked)
        return loader

    def _reduce(self, local_values: dict[str, list[float]]) -> dict[str, float]:
        per_rank = self._context.distributed.allgather(local_values, "reducing validation metrics")
        values: dict[str, list[float]] = {}
        for rank_values in per_rank:
            for name, metric_values in rank_values.items():
                values.setdefault(name, []).extend(metric_values)
        reducer = self._trial.evaluation_reducer()
        if isinstance(reducer, Mapping) and set(reducer) != set(values):
            raise TrialError(
                "evaluation_reducer: must give one reducer for all metrics, or one for each of "
                f"{sorted(values)}, got {sorted(reducer)}"
            )
        return {
            name: _reduce_metric(
                name, metric_values, reducer[name] if isinstance(reducer, Mapping) else reducer
            )
            for name, metric_values in values.items()
        }


def _single_pass(loader: Any) -> Iterator[Any]:
    """Iterate once; a loader that repeats forever, as DeepSpeed's may, stops at its length."""
    return islice(iter(loader), loader_length(loader))


def _reduce_metric(name: str, values: list[float], reducer: Any) -> float:
    if isinstance(reducer, Reducer):
        return reduce_values(values, reducer)
    if callable(reducer):
        with error_context(f"evaluation_reducer of metric {name!r}"):
            return float(reducer(values))
    raise TrialError(
        f"evaluation_reducer: of metric {name!r}: must give a zerotrial.Reducer or a function, "
        f"got {reducer!r}"
    )


def _check_output(output: Any) -> Mapping[str, Any]:
    if not isinstance(output, Mapping):
        raise TrialError(
            "evaluate_batch: must return a dict of metric names to values, got "
            f"{type(output).__name__}"
        )
    return output


def _takes_batch_idx(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    positional = [
        parameter
        for parameter in parameters.values()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in positional)
    return "batch_idx" in parameters or len(positional) >= 2 or variadic
