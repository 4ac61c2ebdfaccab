"""The data loader of a trial: sharded, endless, resumable at the exact sample.

Training deals out an endless sequence of *samples*. Epoch ``e`` is one pass in the order of epoch
``e``; batch ``b`` of an epoch is its samples ``[b * B, (b + 1) * B)`` for a train batch size
``B = micro-batch size x accumulation steps x data-parallel world size``::

    order of the epoch   [ 0  1  2  3 | 4  5  6  7 | 8  9 ]          N = 10 samples
    batches of B = 4     [ batch 0    | batch 1    | batch 2  + 0 1 ]
    micro-batches of 1     r0 r1 r0 r1  r0 r1 r0 r1  r0 r1 r0 r1      2 ranks x 2 accumulation steps

So batch ``b`` holds the same samples however many ranks share it, every micro-batch is full, and
an epoch is a whole number of batches: its last batch is filled up from the start of the same
epoch, or left out with ``drop_last``.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from zerolab.errors import ConfigError
from zerotrial.data.random_state import seeded
from zerotrial.data.samplers import derive_seed

__all__ = ["DataLoader", "Draw", "EpochPlan", "data_length"]

_TRAINING, _VALIDATION = 1, 2  # streams of random numbers that must not meet


@dataclass(frozen=True)
class EpochPlan:
    """How the items of one epoch are dealt out to batches, micro-batches and ranks.

    Args:
        items: Samples in the data set; or batches, where the user's batch sampler makes them.
        micro_batch: Items in one micro-batch on one rank.
        accumulation: Micro-batches in one batch on one rank.
        replicas: Data-parallel world size.
        drop_last: Leave out the samples that do not fill a batch.

    Raises:
        ConfigError: If there is not enough data for one batch.
    """

    items: int
    micro_batch: int
    accumulation: int
    replicas: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.items < 1 or (self.drop_last and self.items < self.batch):
            need = self.batch if self.drop_last else 1
            remedy = "check the path and the filters of the data set"
            if self.items:
                remedy = "use a smaller train_batch_size, or drop_last=False"
            told = f"must hold at least {need} sample(s) (one batch), got {self.items}; {remedy}"
            raise ConfigError("build_training_data_loader", [f"data set: {told}"])

    @property
    def batch(self) -> int:
        """Items in one batch, over all ranks."""
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def batches(self) -> int:
        """Batches in one epoch."""
        return self.items // self.batch if self.drop_last else -(-self.items // self.batch)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one epoch on one rank."""
        return self.batches * self.accumulation

    def span(self, rank: int, micro_batch: int) -> range:
        """Places in the epoch's order that a rank's micro-batch is made of, not yet wrapped."""
        first = (micro_batch * self.replicas + rank) * self.micro_batch
        return range(first, first + self.micro_batch)


class Draw(list[Any]):
    """Indices of one micro-batch, with its number, which the random state of workers follows."""

    number: int = 0


class _TrainingStream(Sampler[Any]):
    """Draws of one rank, from micro-batch ``start`` on, without end."""

    def __init__(
        self, plan: EpochPlan, order: Callable[[int], Sequence[Any]], rank: int, *, whole: bool
    ) -> None:
        self._plan = plan
        self._order = order
        self._rank = rank
        self._whole = whole  # an item is a whole batch of indices
        self.start = 0

    def __iter__(self) -> Iterator[Draw]:
        plan = self._plan
        epoch, micro_batch = divmod(self.start, plan.micro_batches)
        while True:
            order = self._order(epoch)
            for number in range(micro_batch, plan.micro_batches):
                span = plan.span(self._rank, number)
                if span.stop <= plan.items:
                    items = list(order[span.start : span.stop])
                else:
                    items = [order[place % plan.items] for place in span]
                draw = Draw(items[0] if self._whole else items)
                draw.number = (epoch * plan.micro_batches + number) * plan.replicas + self._rank
                yield draw
            epoch, micro_batch = epoch + 1, 0


class _ValidationShard(Sampler[Any]):
    """Every ``replicas``-th batch of one pass, each sample exactly once over all ranks."""

    def __init__(self, batches: Sequence[Sequence[Any]], rank: int, replicas: int) -> None:
        self._batches = batches
        self.numbers = range(rank, len(batches), replicas)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Draw]:
        for number in self.numbers:
            draw = Draw(self._batches[number])
            draw.number = number
            yield draw


class _SeededDataset(Dataset[Any]):
    """In a worker, seed the generators before each micro-batch from its number.

    A transformation that draws random numbers then gives the same samples whatever the number of
    workers, and after a restart.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, draw: Draw) -> Any:
        if get_worker_info() is not None:
            _seed_worker(derive_seed(self._seed, draw.number))
        many = getattr(self.dataset, "__getitems__", None)
        return many(list(draw)) if callable(many) else [self.dataset[index] for index in draw]


class _WorkerInit:
    """Seed a worker by rank and worker, then run the user's own ``worker_init_fn``."""

    def __init__(self, seed: int, then: Callable[[int], None] | None) -> None:
        self._seed = seed
        self._then = then

    def __call__(self, worker_id: int) -> None:
        _seed_worker(derive_seed(self._seed, worker_id))
        if self._then is not None:
            self._then(worker_id)


def _seed_worker(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class DataLoader:
    """What :meth:`ZeroTrial.build_training_data_loader` returns: arguments as torch's loader has.

    It shards by data-parallel rank, repeats for ever in training, shuffles each epoch in an order
    of its own that follows from the trial's seed, and resumes at the exact sample. Outside a
    trial it can be iterated and measured like torch's loader.

    Args:
        dataset: A map-style data set.
        batch_size: Samples in one micro-batch:
            ``context.get_train_micro_batch_size_per_gpu()`` in training.
        shuffle: A new order each epoch.
        sampler: Gives indices in place of ``shuffle``; all ranks run it under the same seed.
        batch_sampler: Gives whole micro-batches of indices; they are dealt out round-robin.
        drop_last: Leave out what does not fill a last batch.
        num_workers: As in torch, and the other arguments too.
        collate_fn: Makes one micro-batch of a list of samples.
        pin_memory: As in torch.
        timeout: As in torch; seconds.
        worker_init_fn: Called in each worker after it has been seeded by rank and worker.
        multiprocessing_context: As in torch.
        generator: Only for use outside a trial; inside, the trial's seed decides.
        prefetch_factor: As in torch.
        persistent_workers: As in torch.
        any_batch_size: Train with micro-batches of another size than the engine's, which is then
            what batches, samples and learning rates are not counted by.

    Raises:
        ValueError: If the arguments exclude each other, or the data set is iterable-style.
    """

    def __init__(  # noqa: PLR0917 - torch's own signature
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002 - as above
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as above
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        any_batch_size: bool = False,
    ) -> None:
        self.dataset = dataset
        self.any_batch_size = any_batch_size
        self.batch_size = batch_size if batch_sampler is None else None
        self.shuffle = shuffle
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.drop_last = drop_last
        _check_arguments(self, batch_size)
        self._generator = generator
        self._worker_init_fn = worker_init_fn
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._plain = self._plain_loader()  # also torch's own check of the other arguments

    def __len__(self) -> int:
        """Micro-batches in one pass on one process, a short last one included."""
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        """One pass on one process, as torch's loader makes it."""
        return iter(self._plain)

    def plan(self, accumulation: int, replicas: int) -> EpochPlan:
        """How an epoch of training is dealt out.

        Raises:
            ConfigError: If there is not enough data for one batch.
        """
        if self.batch_sampler is not None:
            items, micro_batch = len(self.batch_sampler), 1  # type: ignore[arg-type]  # checked
        else:
            items = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
            micro_batch = self.batch_size or 1
        return EpochPlan(items, micro_batch, accumulation, replicas, self.drop_last)

    def training_batches(
        self, plan: EpochPlan, *, seed: int, rank: int, start: int
    ) -> Iterator[Any]:
        """Micro-batches of one rank, without end.

        Args:
            plan: From :meth:`plan`.
            seed: The trial's.
            rank: Data-parallel rank.
            start: Micro-batches that this rank has had before.
        """
        whole = self.batch_sampler is not None
        stream = _TrainingStream(plan, lambda epoch: self._order(seed, epoch), rank, whole=whole)
        stream.start = start
        return iter(self._loader(stream, derive_seed(seed, _TRAINING), rank))

    def validation_loader(self, *, seed: int, rank: int, replicas: int) -> "ValidationLoader":
        """One rank's share of one pass; call :func:`iter` on it for each validation."""
        order = self._order(seed, 0)
        if self.batch_sampler is None:
            size = self.batch_size or 1
            order = list(BatchSampler(order, size, drop_last=self.drop_last))
        shard = _ValidationShard(order, rank, replicas)
        return ValidationLoader(shard, self._loader(shard, derive_seed(seed, _VALIDATION), rank))

    def _order(self, seed: int, epoch: int) -> Sequence[Any]:
        """Indices of one epoch in order; the same on every rank."""
        source = self.batch_sampler if self.batch_sampler is not None else self.sampler
        if source is not None:
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            with seeded(derive_seed(seed, epoch)):
                return list(source)
        if not self.shuffle:
            return range(len(self.dataset))
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        return torch.randperm(len(self.dataset), generator=generator).numpy().data

    def _loader(
        self, batches: Sampler[Any], seed: int, rank: int
    ) -> torch.utils.data.DataLoader[Any]:
        generator = torch.Generator().manual_seed(derive_seed(seed, rank))
        return torch.utils.data.DataLoader(
            _SeededDataset(self.dataset, seed) if self._options["num_workers"] else self.dataset,
            batch_sampler=batches,
            worker_init_fn=_WorkerInit(derive_seed(seed, rank), self._worker_init_fn),
            generator=generator,
            **self._options,
        )

    def _plain_loader(self) -> torch.utils.data.DataLoader[Any]:
        chosen: dict[str, Any] = {"batch_sampler": self.batch_sampler}
        if self.batch_sampler is None:
            chosen = {"batch_size": self.batch_size, "drop_last": self.drop_last}
            chosen |= (
                {"shuffle": self.shuffle} if self.sampler is None else {"sampler": self.sampler}
            )
        return torch.utils.data.DataLoader(
            self.dataset,
            worker_init_fn=self._worker_init_fn,
            generator=self._generator,
            **chosen,
            **self._options,
        )


class ValidationLoader:
    """One rank's share of the validation data."""

    def __init__(self, shard: _ValidationShard, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._shard = shard
        self._loader = loader

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def data_length(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor or array found in it.

    Raises:
        TypeError: If there is none.
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return data_length(batch[0])
    raise TypeError(
        f"cannot count the samples of a batch of type {type(batch).__name__}; "
        "override get_batch_length in the trial"
    )


def _check_arguments(loader: DataLoader, batch_size: int | None) -> None:
    dataset, sampler, batch_sampler = loader.dataset, loader.sampler, loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "zerotrial.DataLoader: must get a map-style data set (__len__ and __getitem__), got "
            f"the iterable-style {type(dataset).__name__}, which it cannot shard or resume; return "
            "torchdata's StatefulDataLoader, which keeps its position, or torch's DataLoader after "
            "context.disable_dataset_reproducibility_checks()"
        )
    if loader.shuffle and sampler is None and not len(dataset):  # torch's words name no cause
        raise ValueError(
            f"zerotrial.DataLoader: the data set ({type(dataset).__name__}) must have at least one "
            "sample to shuffle, got 0; check its path and filters"
        )
    others = sampler is not None or loader.shuffle or loader.drop_last
    if batch_sampler is not None and (batch_size != 1 or others):
        raise ValueError("batch_sampler: excludes batch_size, shuffle, sampler and drop_last")
    if batch_sampler is None and (batch_size is None or batch_size < 1):
        raise ValueError(f"batch_size: must be >= 1, or give a batch_sampler, got {batch_size}")
    for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if given is not None and not hasattr(given, "__len__"):
            raise ValueError(f"{name}: must have a length, got {type(given).__name__} without one")
