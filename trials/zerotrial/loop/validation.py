"""One pass over the validation data on all ranks, and its metrics."""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from zerolab.errors import TrialError
from zerolab.sizes import duration_text
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import check_loader, keeps_position, loader_length
from zerotrial.data.loader import DataLoader
from zerotrial.loop.batch_checks import GivenAnIterator
from zerotrial.loop.console import PROGRESS
from zerotrial.loop.metrics import to_numbers
from zerotrial.reducers import Reducer, naming, reduce_values
from zerotrial.trial import ZeroTrial

__all__ = ["ValidationInterruptedError", "Validator"]

logger = logging.getLogger(__name__)

_NOTHING = object()

_AGREE_EVERY_S = 1.0
"""How often, about, the ranks agree whether to go on; seconds of validation."""
_MOST_CALLS_BETWEEN = 10_000
_TELL_EVERY_S = 60.0
"""How often a rank says how far its validation is."""


class ValidationInterruptedError(Exception):
    """The trial was told to end in the middle of a validation, which is dropped.

    Args:
        wish: The largest of the ranks' wishes.
    """

    def __init__(self, wish: int) -> None:
        super().__init__("told to end in the middle of a validation")
        self.wish = wish


class _Progress:
    """Says once a minute how far a validation is.

    Args:
        total: Batches of the loader; None where it has no length.
        started: When the validation began, on the clock of ``time.monotonic``.
    """

    def __init__(self, total: int | None, started: float) -> None:
        self._total = total
        self._started = started
        self._due = started + _TELL_EVERY_S

    def tell(self, evaluated: int) -> None:
        """Say it, if it is time to; called before each batch, and costs next to nothing.

        Args:
            evaluated: Batches so far.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _TELL_EVERY_S
        passed, total = now - self._started, self._total
        if total is None or evaluated > total:  # how many passes a user makes is not known
            batches, left = f"{evaluated:,} batches", ""
        else:
            batches = f"{evaluated:,} of {total:,} batches"
            left_s = passed / evaluated * (total - evaluated) if evaluated else 0.0
            left = f", about {duration_text(left_s)} left" if left_s else ""
        PROGRESS.info("validating: %s in %s%s", batches, duration_text(passed), left)


class _Batches:
    """An iterator that knows whether there is more, and counts."""

    def __init__(
        self,
        batches: Iterator[Any],
        limit: int | None,
        length: Callable[[Any], int],
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._batches = batches
        self._limit = limit
        self._length = length
        self._tell = tell
        self._ahead: Any = _NOTHING
        self.drawn = 0
        self.samples = 0
        self.last: Any = _NOTHING

    def has(self, count: int) -> bool:
        """Whether at least one more batch is there (``count`` is how many a call takes)."""
        if self._limit is not None and self.drawn + count > self._limit:
            return False
        if self._ahead is _NOTHING:
            self._ahead = next(self._batches, _NOTHING)
        return self._ahead is not _NOTHING

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._tell(self.drawn)
        batch, self._ahead = self._ahead, _NOTHING
        if batch is _NOTHING:
            batch = next(self._batches)
        self.drawn += 1
        self.last = batch
        try:
            self.samples += self._length(batch)
        except TypeError:
            self.samples += 1
        return batch


class _Whole:
    """The validation data for ``evaluate_full_dataset``: the loader itself, but for its iterator.

    Args:
        loader: The user's.
        look: Called between batches with those of all passes so far; raises where the trial is told
            to end.
        tell: Likewise.
    """

    def __init__(
        self, loader: Any, look: Callable[[int], None], tell: Callable[[int], None]
    ) -> None:
        self._loader = loader
        self._look = look
        self._tell = tell
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in _to_its_end(self._loader):
            self._look(self._drawn)
            self._tell(self._drawn)
            self._drawn += 1
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class Validator:
    """Evaluates a trial; made once, run at each validation.

    Args:
        trial: The user's.
        context: Its context, with engines wrapped.
        callbacks: Told of each moment.
        one_batch: Evaluate a single batch, for test mode.
        wish: Asked between batches; anything but 0 on any rank interrupts a validation.

    Raises:
        TrialError: If the trial has nothing to evaluate with, or its loader cannot be used.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        callbacks: CallbackList,
        *,
        one_batch: bool = False,
        wish: Callable[[], int] = lambda: 0,
    ) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._one_batch = one_batch
        self._wish = wish
        self._agree_at = 1  # calls of evaluate_batch after which the ranks agree next
        kind = type(trial)
        self._whole = kind.evaluate_full_dataset is not ZeroTrial.evaluate_full_dataset
        if not self._whole and kind.evaluate_batch is ZeroTrial.evaluate_batch:
            raise TrialError(f"{kind.__name__}: must override evaluate_batch")
        self._with_index = _takes_batch_idx(trial.evaluate_batch)
        self._written_for = GivenAnIterator(trial.evaluate_batch)
        self._lockstep = context.distributed.size > 1 and any(
            engine.forward_is_collective for engine in context.engines
        )
        self._take = 1  # micro-batches that one call of evaluate_batch takes
        if context.use_pipeline_parallel:
            self._take = context.get_num_micro_batches_per_slot()
        self._loader: Any = None
        self._source: Any = None
        if context.mpu.should_build_data_loader:
            self._source = trial.build_validation_data_loader()
            self._loader = self._shard(self._source)
        without = self._source is None
        sizes = context.distributed.allgather(
            (without, None if without else loader_length(self._source)),
            "counting validation batches",
        )
        lengths = [length for missing, length in sizes if not missing]
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
            ValidationInterruptedError: On all ranks, if any is told to end meanwhile.
        """
        self._callbacks.call("on_validation_start")
        started = time.monotonic()
        context = self._context
        for model in context.models:
            model.eval()
        try:
            with context.reducers.validating(), torch.no_grad():
                evaluate = self._evaluate_whole if self._whole else self._evaluate_batches
                metrics = evaluate(started)
                reduced = context.reducers.reduce(context.distributed, training=False)
        finally:
            for model in context.models:
                model.train()
        metrics |= to_numbers(reduced)
        self._callbacks.call("on_validation_end", metrics)
        return metrics

    def _evaluate_whole(self, started: float) -> dict[str, float]:
        distributed, found, wish = self._context.distributed, None, 0
        self._agree_at = 1
        if distributed.is_chief or self._lockstep:
            data = self._source
            if hasattr(data, "__iter__"):
                progress = _Progress(loader_length(data), started)
                data = _Whole(data, lambda drawn: self._heed(drawn, started), progress.tell)
            try:
                found = self._trial.evaluate_full_dataset(data)
            except ValidationInterruptedError as told:
                wish = told.wish
        found, wish = distributed.broadcast((found, wish), "sharing validation metrics")
        if wish:
            raise ValidationInterruptedError(wish)
        return to_numbers(_mapping(found))

    def _heed(self, drawn: int, started: float) -> None:
        """Look, about once a second, whether the trial is told to end.

        In lockstep **collective**: the ranks draw their batches alike, as their forward passes are.

        Raises:
            ValidationInterruptedError: If so; in lockstep on all ranks.
        """
        if drawn < self._agree_at:
            return
        call_s = (time.monotonic() - started) / drawn
        if self._lockstep:
            self._agree(mine=True, call_s=call_s)
        elif wish := int(self._wish()):
            raise ValidationInterruptedError(wish)
        else:
            self._pause(call_s)

    def _evaluate_batches(self, started: float) -> dict[str, float]:
        self._callbacks.call("on_validation_epoch_start")
        keep = self._callbacks.overrides("on_validation_epoch_end")
        outputs: list[Any] = []
        values: dict[str, list[float]] = {}
        batches = self._batches(started)
        calls = 0
        self._agree_at = 1
        while self._more(batches, calls, started):
            if batches is not None and not batches.has(self._take):
                self._evaluate_for_others(batches, calls)
                continue
            output = self._evaluate(batches, calls)
            calls += 1
            if keep:
                outputs.append(output)
            for name, value in to_numbers(_mapping(output)).items():
                values.setdefault(name, []).append(value)
        self._callbacks.call("on_validation_epoch_end", outputs)
        samples = batches.samples if batches is not None else 0
        logger.info("validated %d samples in %.2f s", samples, time.monotonic() - started)
        return self._reduce(values if self._context.mpu.should_report_metrics else {})

    def _evaluate(self, batches: _Batches | None, calls: int) -> Any:
        before = batches.drawn if batches is not None else 0
        self._context.set_default_data(batches)
        try:
            with self._written_for:
                if self._with_index:
                    output = self._trial.evaluate_batch(batches, calls)
                else:
                    output = self._trial.evaluate_batch(batches)
        except StopIteration:
            raise TrialError(
                f"evaluate_batch: must take {self._take} micro-batch(es) in one call with "
                "next(dataloader_iter), and asked for more than there were"
            ) from None
        if batches is not None and batches.drawn == before and self._loader is not None:
            raise TrialError("evaluate_batch: must take its batch with next(dataloader_iter)")
        return output

    def _evaluate_for_others(self, batches: _Batches, calls: int) -> None:
        """Take part in a forward pass that other ranks need, and forget its results."""
        spare = batches.last if batches.last is not _NOTHING else next(iter(self._source), _NOTHING)
        if spare is _NOTHING:
            raise TrialError(
                "the validation data are empty on this rank; give it at least one batch"
            )
        with self._context.reducers.ignoring():
            self._evaluate(_Batches(iter([spare] * self._take), None, lambda _: 0), calls)

    def _more(self, batches: _Batches | None, calls: int, started: float) -> bool:
        """Whether another call is due on this rank. **Collective**: all ranks leave together.

        In lockstep the ranks agree before each call. Else they meet about once a second, and a
        rank that has no more batches waits for the others.

        Raises:
            ValidationInterruptedError: On all ranks, if any is told to end.
        """
        mine = batches is not None and batches.has(self._take)
        while not mine or self._lockstep or calls >= self._agree_at:
            left = self._agree(mine=mine, call_s=(time.monotonic() - started) / max(calls, 1))
            if mine or self._lockstep or not left:
                return left
        return mine

    def _agree(self, *, mine: bool, call_s: float) -> bool:
        """Return whether any rank has more batches, and choose when to meet again."""
        told = (mine, int(self._wish()), call_s)
        operation = "counting validation batches"
        more, wishes, seconds = zip(
            *self._context.distributed.allgather(told, operation), strict=True
        )
        if any(wishes):
            raise ValidationInterruptedError(max(wishes))
        self._pause(max(seconds))
        return any(more)

    def _pause(self, call_s: float) -> None:
        pause = int(_AGREE_EVERY_S / max(call_s, 1e-9))
        self._agree_at += min(max(1, pause), _MOST_CALLS_BETWEEN)

    def _batches(self, started: float) -> _Batches | None:
        if self._loader is None:
            return None
        limit = self._take if self._one_batch else None
        if limit is None and self._take > 1:
            whole, rest = divmod(len(self._loader), self._take)
            if not whole:
                raise TrialError(
                    f"validation data: a pipeline evaluates {self._take} micro-batches at a time, "
                    f"and there are only {rest}"
                )
            if rest:
                logger.warning("%d validation micro-batches do not fill a batch: left out", rest)
            limit = whole * self._take
        total = loader_length(self._loader) if limit is None else limit
        tell = _Progress(total, started).tell
        return _Batches(_to_its_end(self._loader), limit, self._trial.get_batch_length, tell)

    def _shard(self, loader: Any) -> Any:
        if loader is None or self._whole:
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

    def _reduce(self, mine: dict[str, list[float]]) -> dict[str, float]:
        per_rank = self._context.distributed.allgather(mine, "reducing validation metrics")
        values: dict[str, list[float]] = {}
        for of_rank in per_rank:
            for name, found in of_rank.items():
                values.setdefault(name, []).extend(found)
        how = self._trial.evaluation_reducer()
        if isinstance(how, Mapping) and set(how) != set(values):
            raise TrialError(
                "evaluation_reducer: must give one reducer for all metrics, or one for each of "
                f"{sorted(values)}, got {sorted(how)}"
            )
        return {
            name: _reduce_one(name, found, how[name] if isinstance(how, Mapping) else how)
            for name, found in values.items()
        }


def _to_its_end(loader: Any) -> Iterator[Any]:
    """One pass: a loader that repeats for ever, as DeepSpeed's may, ends where its length says."""
    return islice(iter(loader), loader_length(loader))


def _reduce_one(name: str, values: list[float], how: Any) -> float:
    if isinstance(how, Reducer):
        return reduce_values(values, how)
    if callable(how):
        with naming(f"evaluation_reducer of metric {name!r}"):
            return float(how(values))
    raise TrialError(
        f"evaluation_reducer: of metric {name!r}: must give a zerotrial.Reducer or a function, "
        f"got {how!r}"
    )


def _mapping(output: Any) -> Mapping[str, Any]:
    if not isinstance(output, Mapping):
        raise TrialError(
            "evaluate_batch: must return a dict of metric names to values, got "
            f"{type(output).__name__}"
        )
    return output


def _takes_batch_idx(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    positional = [
        one
        for one in parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    ]
    variadic = any(one.kind is one.VAR_POSITIONAL for one in positional)
    return "batch_idx" in parameters or len(positional) >= 2 or variadic
