"""Data loader of a trial: sharded, endless, and resumable at the exact sample.

Training reads an endless sequence of *samples*. Epoch ``e`` is one pass in the order of epoch
``e``. Batch ``b`` of an epoch has its samples ``[b * B, (b + 1) * B)`` for a train batch size
``B = micro-batch size x accumulation steps x data-parallel world size``::

    order of the epoch   [ 0  1  2  3 | 4  5  6  7 | 8  9 ]          N = 10 samples
    batches of B = 4     [ batch 0    | batch 1    | batch 2  + 0 1 ]
    micro-batches of 1     r0 r1 r0 r1  r0 r1 r0 r1  r0 r1 r0 r1      2 ranks x 2 accumulation steps

So batch ``b`` has the same samples for any number of ranks, and every micro-batch is full. An epoch
is a whole number of batches: its last batch is filled from the start of the same epoch, or dropped
with ``drop_last``.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from zerolab.errors import ConfigError
from zerotrial.data.random_state import derive_seed, temporary_seed

__all__ = ["DataLoader", "EpochPlan", "IndexBatch", "data_length"]

_TRAINING, _VALIDATION = 1, 2  # different seeds: the two streams must not correlate


@dataclass(frozen=True)
class EpochPlan:
    """Assignment of one epoch's items to batches, micro-batches and ranks.

    Args:
        items: Samples in the data set; or batches, with the user's batch sampler.
        micro_batch: Items in one micro-batch on one rank.
        accumulation: Micro-batches in one batch on one rank.
        replicas: Data-parallel world size.
        drop_last: Drop the samples that do not fill a batch.

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
            minimum = self.batch if self.drop_last else 1
            remedy = "check the path and the filters of the data set"
            if self.items:
                remedy = "use a smaller train_batch_size, or drop_last=False"
            problem = (
                f"must hold at least {minimum} sample(s) (one batch), got {self.items}; {remedy}"
            )
            raise ConfigError("build_training_data_loader", [f"data set: {problem}"])

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


class IndexBatch(list[Any]):
    """Indices of one micro-batch, and its number, from which workers derive their seed."""

    number: int = 0


class _TrainingSampler(Sampler[Any]):
    """Endless batch sampler of one rank, starting at micro-batch ``start``."""

    def __init__(
        self, plan: EpochPlan, order: Callable[[int], Sequence[Any]], rank: int, *, batched: bool
    ) -> None:
        self._plan = plan
        self._order = order
        self._rank = rank
        self._batched = batched  # each item of the order is a batch of indices
        self.start = 0

    def __iter__(self) -> Iterator[IndexBatch]:
        plan, rank, batched = self._plan, self._rank, self._batched
        items, size, replicas, per_epoch = (
            plan.items,
            plan.micro_batch,
            plan.replicas,
            plan.micro_batches,
        )
        epoch, micro_batch = divmod(self.start, per_epoch)
        while True:
            order = self._order(epoch)
            # Ranks take turns within a micro-batch number, so that a batch is a contiguous range of
            # the order and does not depend on the number of ranks.
            before = epoch * per_epoch * replicas
            for number in range(micro_batch * replicas + rank, per_epoch * replicas, replicas):
                first = number * size
                if batched:
                    indices = IndexBatch(order[first % items])
                elif first + size <= items:
                    indices = IndexBatch(order[first : first + size])
                else:  # wrapped to the start of the epoch
                    wrapped = range(first, first + size)
                    indices = IndexBatch([order[index % items] for index in wrapped])
                # Unique over ranks and epochs, so that no two micro-batches share a seed.
                indices.number = before + number
                yield indices
            epoch, micro_batch = epoch + 1, 0


class _ValidationShard(Sampler[Any]):
    """Batch sampler of one rank's validation batches; all ranks together cover each sample once."""

    def __init__(self, batches: Sequence[Sequence[Any]], rank: int, replicas: int) -> None:
        self._batches = batches
        self.numbers = range(rank, len(batches), replicas)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[IndexBatch]:
        for number in self.numbers:
            indices = IndexBatch(self._batches[number])
            indices.number = number
            yield indices


class _SeededDataset(Dataset[Any]):
    """Data set that seeds a worker's generators before each micro-batch, from its number.

    Random transformations then yield the same samples for any number of workers, and after a
    restart.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        get_items = getattr(dataset, "__getitems__", None)
        self._get_items = get_items if callable(get_items) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: IndexBatch) -> Any:
        if get_worker_info() is not None:
            _seed_worker(derive_seed(self._seed, indices.number))
        if self._get_items is not None:
            return self._get_items(list(indices))
        return [self.dataset[index] for index in indices]


class _WorkerInit:
    """Worker initializer that seeds by rank and worker, then calls the user's function."""

    def __init__(self, seed: int, user_init: Callable[[int], None] | None) -> None:
        self._seed = seed
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        _seed_worker(derive_seed(self._seed, worker_id))
        if self._user_init is not None:
            self._user_init(worker_id)


def _seed_worker(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class DataLoader:
    """Data loader for trials, with the arguments of torch's loader.

    Return it from :meth:`ZeroTrial.build_training_data_loader`. It shards the data by data-parallel
    rank, repeats it forever in training, and resumes at the exact sample. The order of each epoch
    depends only on the trial's seed. Outside a trial it behaves like torch's loader.

    Args:
        dataset: A map-style data set.
        batch_size: Samples in one micro-batch:
            ``context.get_train_micro_batch_size_per_gpu()`` in training.
        shuffle: Use a new order in each epoch.
        sampler: Source of indices, instead of ``shuffle``; all ranks run it under the same seed.
        batch_sampler: Source of micro-batches of indices, which ranks get in turn.
        drop_last: Drop the samples that do not fill a last batch.
        num_workers: As in torch.
        collate_fn: Function that makes one micro-batch of a list of samples.
        pin_memory: As in torch.
        timeout: As in torch; seconds.
        worker_init_fn: Called in each worker after it has been seeded by rank and worker.
        multiprocessing_context: As in torch.
        generator: Source of random numbers outside a trial; inside, the trial's seed applies.
        prefetch_factor: As in torch.
        persistent_workers: As in torch.
        any_batch_size: Accept a ``batch_size`` other than the engine's micro-batch size. Reported
            samples and learning rates still count with the engine's.

    Raises:
        ValueError: If the arguments exclude each other, or the data set is iterable-style.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(10))
        >>> loader = zerotrial.DataLoader(data, batch_size=4, shuffle=True)
        >>> len(loader)
        3
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
        self._torch_loader = self._make_torch_loader()  # torch checks the other arguments here

    def __len__(self) -> int:
        """Return the micro-batches of one pass on one process, including a short last one."""
        return len(self._torch_loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate once on one process, as torch's loader does."""
        return iter(self._torch_loader)

    def plan(self, accumulation: int, replicas: int) -> EpochPlan:
        """Return the assignment of a training epoch to ranks.

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
        """Return an endless iterator over the micro-batches of one rank.

        Args:
            plan: Result of :meth:`plan`.
            seed: The trial's seed.
            rank: Data-parallel rank.
            start: Micro-batches to skip.
        """
        batched = self.batch_sampler is not None
        stream = _TrainingSampler(
            plan, lambda epoch: self._order(seed, epoch), rank, batched=batched
        )
        stream.start = start
        return iter(self._loader(stream, derive_seed(seed, _TRAINING), rank))

    def validation_loader(self, *, seed: int, rank: int, replicas: int) -> "ValidationLoader":
        """Return one rank's share of a pass.

        Iterate it once for each validation.
        """
        order = self._order(seed, 0)
        if self.batch_sampler is None:
            size = self.batch_size or 1
            order = list(BatchSampler(order, size, drop_last=self.drop_last))
        shard = _ValidationShard(order, rank, replicas)
        return ValidationLoader(shard, self._loader(shard, derive_seed(seed, _VALIDATION), rank))

    def _order(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the indices of one epoch in order, the same on every rank."""
        source = self.batch_sampler if self.batch_sampler is not None else self.sampler
        if source is not None:
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            with temporary_seed(derive_seed(seed, epoch)):
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

    def _make_torch_loader(self) -> torch.utils.data.DataLoader[Any]:
        sampling: dict[str, Any] = {"batch_sampler": self.batch_sampler}
        if self.batch_sampler is None:
            sampling = {"batch_size": self.batch_size, "drop_last": self.drop_last}
            sampling |= (
                {"shuffle": self.shuffle} if self.sampler is None else {"sampler": self.sampler}
            )
        return torch.utils.data.DataLoader(
            self.dataset,
            worker_init_fn=self._worker_init_fn,
            generator=self._generator,
            **sampling,
            **self._options,
        )


class ValidationLoader:
    """Loader of one rank's share of the validation data."""

    def __init__(self, shard: _ValidationShard, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._shard = shard
        self._loader = loader

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def data_length(batch: Any) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: A tensor or array, or a dict, list or tuple whose first item has one.

    Returns:
        Length of the first tensor or array; 1 if it has no dimension.

    Raises:
        TypeError: If it has neither.

    Example:
        >>> zerotrial.data_length({"x": torch.zeros(8, 4), "y": torch.zeros(8)})
        8
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
    if loader.shuffle and sampler is None and not len(dataset):  # torch's message lacks the cause
        raise ValueError(
            f"zerotrial.DataLoader: the data set ({type(dataset).__name__}) must have at least one "
            "sample to shuffle, got 0; check its path and filters"
        )
    conflicting = sampler is not None or loader.shuffle or loader.drop_last
    if batch_sampler is not None and (batch_size != 1 or conflicting):
        raise ValueError("batch_sampler: excludes batch_size, shuffle, sampler and drop_last")
    if batch_sampler is None and (batch_size is None or batch_size < 1):
        raise ValueError(f"batch_size: must be >= 1, or give a batch_sampler, got {batch_size}")
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None and not hasattr(value, "__len__"):
            raise ValueError(f"{name}: must have a length, got {type(value).__name__} without one")
