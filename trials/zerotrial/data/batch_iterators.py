"""Where the training loop's micro-batches come from, and at which one it is.

A feed wraps whatever the trial returned as its training loader: ours, one that keeps its own
position (``state_dict`` and ``load_state_dict``), or any other iterable.
"""

import logging
from collections.abc import Iterator
from typing import Any, Protocol

from zerolab.errors import TrialError
from zerotrial.data.loader import DataLoader
from zerotrial.data.random_state import seeded
from zerotrial.data.samplers import derive_seed

__all__ = [
    "EmptyFeed", "Feed", "IterableFeed", "ShardedFeed", "StatefulFeed", "loader_length", "make_feed"
]  # fmt: skip

logger = logging.getLogger(__name__)

State = dict[str, Any]


class Feed(Protocol):
    """An endless iterator of micro-batches that knows its place."""

    drawn: int
    """Micro-batches that the trial has drawn since it began, restarts included."""

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in one pass on this rank; ``None`` when the data has no length."""

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch, where that is known beforehand."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def state(self) -> State:
        """Where the next micro-batch is, as plain data."""

    def restore(self, state: State) -> None:
        """Go on where :meth:`state` was taken; before the first draw."""


class ShardedFeed:
    """Draws from :class:`zerotrial.DataLoader`; its place is a number of samples over all ranks.

    Args:
        loader: The trial's.
        seed: The trial's.
        rank: Data-parallel rank.
        replicas: Data-parallel world size.
        accumulation: Micro-batches in one batch.

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
        """Batches in one pass; ``None`` when the data has no length."""
        return self._plan.batches

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch, where that is known."""
        return self._loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        return self

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
        """Where the next micro-batch is."""
        epoch, micro_batch = divmod(self.drawn, self._plan.micro_batches)
        items = micro_batch * self._plan.micro_batch * self._plan.replicas
        return {"kind": "sharded", "epoch": epoch, "items": items, "of": self._plan.items}

    def restore(self, state: State) -> None:
        """Go on where the state was taken."""
        _check_kind(state, "sharded")
        plan = self._plan
        if state["of"] != plan.items:
            logger.warning(
                "the training data had %d samples when the checkpoint was saved and has %d now; "
                "the order of samples is another one from here on",
                state["of"],
                plan.items,
            )
        micro_batch, rest = divmod(state["items"], plan.micro_batch * plan.replicas)
        if rest:
            logger.warning(
                "the micro-batch size or the number of ranks has changed so that the checkpoint's "
                "place lies inside a micro-batch: %d samples of this epoch are seen twice",
                rest,
            )
        self.drawn = state["epoch"] * plan.micro_batches + min(micro_batch, plan.micro_batches)


class IterableFeed:
    """Draws from any iterable, over and over; finds its place again by drawing and dropping.

    Each pass begins under a seed of its own, so that a shuffling torch loader gives the same order
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
        """Batches in one pass; ``None`` when the data has no length."""
        try:
            return max(1, len(self._loader) // self._accumulation)
        except TypeError:
            return None

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch, where that is known."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    def __iter__(self) -> Iterator[Any]:
        return self

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
        """Where the next micro-batch is."""
        return {
            "kind": self.kind,
            "epoch": self._epoch,
            "drawn_in_epoch": self._drawn_in_epoch,
            "drawn": self.drawn,
        }

    def restore(self, state: State) -> None:
        """Go on where the state was taken."""
        _check_kind(state, self.kind)
        self._epoch = state["epoch"]
        skip = state["drawn_in_epoch"]
        if skip:
            logger.info("drawing and dropping %d micro-batches to find the place again", skip)
        for _ in range(skip):
            next(self)
        self.drawn = state["drawn"]

    def _begin_epoch(self) -> Any:
        for sampler in (self._loader, getattr(self._loader, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        with seeded(derive_seed(self._seed, self._epoch)):
            self._batches = iter(self._loader)
            try:
                return next(self._batches)
            except StopIteration:
                raise TrialError(
                    "the training data loader gave no micro-batch at all; it must give at least "
                    "one in each pass, and be iterable again and again"
                ) from None


class StatefulFeed(IterableFeed):
    """Draws from a loader that keeps its own position, such as torchdata's StatefulDataLoader."""

    kind = "stateful"

    def __init__(self, loader: Any, *, seed: int, accumulation: int, replicas: int) -> None:
        super().__init__(loader, seed=seed, accumulation=accumulation)
        self._replicas = replicas

    def state(self) -> State:
        """Where the next micro-batch is."""
        return super().state() | {
            "replicas": self._replicas,
            "loader": self._loader.state_dict() if self._drawn_in_epoch else None,
        }

    def restore(self, state: State) -> None:
        """Go on where the state was taken."""
        _check_kind(state, self.kind)
        if state["replicas"] != self._replicas:
            raise TrialError(
                f"the training loader keeps its own position, saved by {state['replicas']} "
                f"data-parallel ranks: it cannot go on with {self._replicas}; use the same number "
                "of slots, or zerotrial.DataLoader, which can"
            )
        self._epoch = state["epoch"]
        self._drawn_in_epoch = state["drawn_in_epoch"]
        self.drawn = state["drawn"]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
            self._batches = iter(self._loader)


class EmptyFeed:
    """Stands for the loader on ranks that draw nothing: inner stages of a pipeline."""

    drawn = 0
    batches_per_epoch = None
    batch_size = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise TrialError("this rank has no training data: inner pipeline stages draw none")

    def state(self) -> State:
        """Where the next micro-batch is."""
        return {"kind": "empty"}

    def restore(self, state: State) -> None:
        """Nothing to restore."""


def make_feed(
    loader: Any,
    *,
    seed: int,
    rank: int,
    replicas: int,
    accumulation: int,
    checked: bool,
    micro_batch: int | None = None,
) -> Feed:
    """Choose the feed for what the trial returned as its training loader.

    Args:
        loader: From ``build_training_data_loader``.
        seed: The trial's.
        rank: Data-parallel rank.
        replicas: Data-parallel world size.
        accumulation: Micro-batches in one batch.
        checked: Whether only loaders that resume exactly are let through.
        micro_batch: Samples that the engine takes in one forward pass; None when unknown.

    Raises:
        TrialError: If the loader cannot be used, saying what to do.
    """
    if isinstance(loader, DataLoader):
        _check_batch_size(loader, micro_batch)
        return ShardedFeed(
            loader, seed=seed, rank=rank, replicas=replicas, accumulation=accumulation
        )
    check_loader(loader, "build_training_data_loader", checked=checked)
    if loader_length(loader) == 0:
        raise TrialError(
            "build_training_data_loader: must give at least one micro-batch, got an empty loader; "
            "check the path and the filters of its data set, and drop_last"
        )
    if keeps_position(loader):
        return StatefulFeed(loader, seed=seed, accumulation=accumulation, replicas=replicas)
    return IterableFeed(loader, seed=seed, accumulation=accumulation)


def loader_length(loader: Any) -> int | None:
    """Return the batches of a loader; None where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def keeps_position(loader: Any) -> bool:
    """Whether a loader has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def check_loader(loader: Any, method: str, *, checked: bool) -> None:
    """Refuse what is no loader, and what could not be resumed unless the user opted out.

    Raises:
        TrialError: Saying what to return instead.
    """
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    if not hasattr(loader, "__iter__"):
        raise TrialError(f"{method}: must return a zerotrial.DataLoader, got {kind}")
    if checked and not isinstance(loader, DataLoader) and not keeps_position(loader):
        raise TrialError(
            f"{method}: must return a zerotrial.DataLoader, which shards the data by rank, "
            f"shuffles reproducibly and resumes at the exact sample, got {kind}. To use this "
            "loader all the same, and take care of sharding yourself, call "
            "context.disable_dataset_reproducibility_checks() in __init__"
        )


def _check_batch_size(loader: DataLoader, micro_batch: int | None) -> None:
    given = loader.batch_size
    if loader.any_batch_size or given is None or micro_batch in (None, given):
        return
    raise TrialError(
        "build_training_data_loader: batch_size of the DataLoader must be the micro-batch size of "
        f"the engine, {micro_batch} (train_micro_batch_size_per_gpu), got {given}; pass "
        "context.get_train_micro_batch_size_per_gpu(), or any_batch_size=True if another size is "
        "meant"
    )


def _check_kind(state: State, kind: str) -> None:
    if state["kind"] != kind:
        raise TrialError(
            f"the checkpoint was saved with a training loader of another kind ({state['kind']!r}; "
            f"now {kind!r}), so the place in the data cannot be found; return the same kind of "
            "loader, or start a new trial"
        )
