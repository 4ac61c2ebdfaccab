"""Endless, resumable iterators over the training loop's micro-batches.

A batch iterator wraps the trial's training loader: a
:class:`zerotrial.DataLoader`, a loader that saves its position (``state_dict`` and
``load_state_dict``), or any other iterable.
"""

import logging
from collections.abc import Iterator
from typing import Any

from zerolab.errors import TrialError
from zerotrial.data.loader import DataLoader
from zerotrial.data.random_state import derive_seed, temporary_seed

__all__ = [
    "BatchIterator",
    "EmptyBatchIterator",
    "IterableBatchIterator",
    "ShardedBatchIterator",
    "StatefulBatchIterator",
    "loader_length",
    "make_batch_iterator"
]  # fmt: skip

logger = logging.getLogger(__name__)

State = dict[str, Any]


class BatchIterator:
    """Endless iterator of micro-batches whose position can be saved."""

    drawn = 0
    """Micro-batches that the trial has drawn since it began, across restarts."""

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in one pass on this rank; ``None`` if the data has no length."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch; ``None`` if unknown."""
        return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def state(self) -> State:
        """Return the position of the next micro-batch as plain data."""
        raise NotImplementedError

    def restore(self, state: State) -> None:
        """Continue from the position of :meth:`state`; call it before the first draw."""


class ShardedBatchIterator(BatchIterator):
    """Iterator over a :class:`zerotrial.DataLoader`.

    The saved position counts samples over all ranks, so that it is valid for any number of ranks.

    Raises:
        ConfigError: If there is not enough data for one batch.
    """

    def __init__(
        self, loader: DataLoader, *, seed: int, rank: int, replicas: int, accumulation: int
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._rank = rank
        self._plan = loader.plan(accumulation, replicas)
        self._batches: Iterator[Any] | None = None
        self.drawn = 0

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in one pass; ``None`` if the data has no length."""
        return self._plan.batches

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch; ``None`` if unknown."""
        return self._loader.batch_size

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            batches = self._batches = self._loader.training_batches(
                self._plan, seed=self._seed, rank=self._rank, start=self.drawn
            )
        batch = next(batches)
        self.drawn += 1
        return batch

    def state(self) -> State:
        """Return the position of the next micro-batch."""
        epoch, micro_batch = divmod(self.drawn, self._plan.micro_batches)
        items = micro_batch * self._plan.micro_batch * self._plan.replicas
        return {"kind": "sharded", "epoch": epoch, "items": items, "of": self._plan.items}

    def restore(self, state: State) -> None:
        """Continue from a saved position."""
        _check_kind(state, "sharded")
        plan = self._plan
        if state["of"] != plan.items:
            logger.warning(
                "the training data had %d samples when the checkpoint was saved and has %d now; "
                "the order of samples changes from here on",
                state["of"],
                plan.items,
            )
        micro_batch, remainder = divmod(state["items"], plan.micro_batch * plan.replicas)
        if remainder:
            logger.warning(
                "the micro-batch size or the number of ranks has changed so that the checkpoint's "
                "position is inside a micro-batch: %d samples of this epoch are repeated",
                remainder,
            )
        self.drawn = state["epoch"] * plan.micro_batches + min(micro_batch, plan.micro_batches)


class IterableBatchIterator(BatchIterator):
    """Iterator that repeats any iterable; a resume skips the batches drawn before.

    Each pass starts under its own seed, so that a shuffling torch loader yields the same order
    after a restart.
    """

    kind = "iterable"

    def __init__(self, loader: Any, *, seed: int, accumulation: int) -> None:
        self._loader = loader
        self._seed = seed
        self._accumulation = accumulation
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self._drawn_in_epoch = 0
        self.drawn = 0

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in one pass; ``None`` if the data has no length."""
        try:
            return max(1, len(self._loader) // self._accumulation)
        except TypeError:
            return None

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch; ``None`` if unknown."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    def __next__(self) -> Any:
        if self._batches is None:
            batch = self._begin_epoch()
        else:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._epoch, self._drawn_in_epoch = self._epoch + 1, 0
                batch = self._begin_epoch()
        self.drawn += 1
        self._drawn_in_epoch += 1
        return batch

    def state(self) -> State:
        """Return the position of the next micro-batch."""
        return {
            "kind": self.kind,
            "epoch": self._epoch,
            "drawn_in_epoch": self._drawn_in_epoch,
            "drawn": self.drawn,
        }

    def restore(self, state: State) -> None:
        """Continue from a saved position."""
        _check_kind(state, self.kind)
        self._epoch = state["epoch"]
        skip = state["drawn_in_epoch"]
        if skip:
            logger.info("skipping %d micro-batches to reach the checkpoint's position", skip)
        for _ in range(skip):
            next(self)
        self.drawn = state["drawn"]

    def _begin_epoch(self) -> Any:
        for sampler in (self._loader, getattr(self._loader, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        with temporary_seed(derive_seed(self._seed, self._epoch)):
            self._batches = iter(self._loader)
            try:
                return next(self._batches)
            except StopIteration:
                raise TrialError(
                    "the training data loader returned no micro-batch; it must return at least "
                    "one per pass, and be iterable repeatedly"
                ) from None


class StatefulBatchIterator(IterableBatchIterator):
    """Iterator over a loader that saves its position, such as torchdata's StatefulDataLoader."""

    kind = "stateful"

    def __init__(self, loader: Any, *, seed: int, accumulation: int, replicas: int) -> None:
        super().__init__(loader, seed=seed, accumulation=accumulation)
        self._replicas = replicas

    def state(self) -> State:
        """Return the position of the next micro-batch."""
        return super().state() | {
            "replicas": self._replicas,
            "loader": self._loader.state_dict() if self._drawn_in_epoch else None,
        }

    def restore(self, state: State) -> None:
        """Continue from a saved position."""
        _check_kind(state, self.kind)
        if state["replicas"] != self._replicas:
            raise TrialError(
                f"the training loader keeps its own position, saved by {state['replicas']} "
                f"data-parallel ranks: it cannot resume with {self._replicas}; use the same number "
                "of slots, or zerotrial.DataLoader, which can"
            )
        self._epoch = state["epoch"]
        self._drawn_in_epoch = state["drawn_in_epoch"]
        self.drawn = state["drawn"]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
            self._batches = iter(self._loader)


class EmptyBatchIterator(BatchIterator):
    """Placeholder on ranks that read no data: inner stages of a pipeline."""

    def __next__(self) -> Any:
        raise TrialError("this rank has no training data: inner pipeline stages draw none")

    def state(self) -> State:
        """Return the position of the next micro-batch."""
        return {"kind": "empty"}

    def restore(self, state: State) -> None:
        """Do nothing."""


def make_batch_iterator(
    loader: Any,
    *,
    seed: int,
    rank: int,
    replicas: int,
    accumulation: int,
    checked: bool,
    micro_batch: int | None = None,
) -> BatchIterator:
    """Choose the batch iterator for a training loader.

    Args:
        loader: Result of ``build_training_data_loader``.
        seed: The trial's seed.
        rank: Data-parallel rank.
        replicas: Data-parallel world size.
        accumulation: Micro-batches in one batch.
        checked: Reject loaders that cannot resume exactly.
        micro_batch: Micro-batch size of the engine; None if unknown.

    Raises:
        TrialError: If the loader is invalid.
    """
    if isinstance(loader, DataLoader):
        _check_batch_size(loader, micro_batch)
        return ShardedBatchIterator(
            loader, seed=seed, rank=rank, replicas=replicas, accumulation=accumulation
        )
    check_loader(loader, "build_training_data_loader", checked=checked)
    if loader_length(loader) == 0:
        raise TrialError(
            "build_training_data_loader: must give at least one micro-batch, got an empty loader; "
            "check the path and the filters of its data set, and drop_last"
        )
    if keeps_position(loader):
        return StatefulBatchIterator(
            loader, seed=seed, accumulation=accumulation, replicas=replicas
        )
    return IterableBatchIterator(loader, seed=seed, accumulation=accumulation)


def loader_length(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def keeps_position(loader: Any) -> bool:
    """Return whether a loader has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def check_loader(loader: Any, method: str, *, checked: bool) -> None:
    """Check that a loader is iterable and, unless the user opted out, resumable.

    Raises:
        TrialError: If it is not.
    """
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    if not hasattr(loader, "__iter__"):
        raise TrialError(f"{method}: must return a zerotrial.DataLoader, got {kind}")
    if checked and not isinstance(loader, DataLoader) and not keeps_position(loader):
        raise TrialError(
            f"{method}: must return a zerotrial.DataLoader, which shards the data by rank, "
            f"shuffles reproducibly and resumes at the exact sample, got {kind}. To use this "
            "loader and shard the data yourself, call "
            "context.disable_dataset_reproducibility_checks() in __init__"
        )


def _check_batch_size(loader: DataLoader, micro_batch: int | None) -> None:
    batch_size = loader.batch_size
    if loader.any_batch_size or batch_size is None or micro_batch in (None, batch_size):
        return
    raise TrialError(
        "build_training_data_loader: batch_size of the DataLoader must be the micro-batch size of "
        f"the engine, {micro_batch} (train_micro_batch_size_per_gpu), got {batch_size}; pass "
        "context.get_train_micro_batch_size_per_gpu(), or any_batch_size=True to train with "
        "another size"
    )


def _check_kind(state: State, kind: str) -> None:
    if state["kind"] != kind:
        raise TrialError(
            f"the checkpoint was saved with a training loader of another kind ({state['kind']!r}; "
            f"now {kind!r}), so the position in the data is unknown; return the same kind of "
            "loader, or start a new trial"
        )
