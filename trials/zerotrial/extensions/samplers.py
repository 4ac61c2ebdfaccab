"""Samplers that repeat, shard, skip and shuffle.

:class:`zerotrial.DataLoader` does all of this itself. The samplers are for users who build their
own loader (after ``context.disable_dataset_reproducibility_checks()``)::

    sampler = samplers.ReproducibleShuffleSampler(range(len(data)), seed=context.get_trial_seed())
    batches = torch.utils.data.BatchSampler(sampler, batch_size=8, drop_last=False)
    batches = samplers.DistributedBatchSampler(batches, num_replicas=size, rank=rank)
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import Sampler

from zerotrial.data.random_state import derive_seed

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
]

T_co = TypeVar("T_co", covariant=True)


class Sized(Protocol[T_co]):
    """Re-iterable collection with a length."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...


class RepeatSampler(Sampler[Any]):
    """Repeat a sampler forever.

    Its length is that of one pass. Before each pass, ``set_epoch`` of the sampler is called with
    the number of the pass, if it has that method.

    Args:
        sampler: Any re-iterable collection with a length.

    Example:
        >>> from itertools import islice
        >>> list(islice(zerotrial.samplers.RepeatSampler([0, 1, 2]), 5))
        [0, 1, 2, 0, 1]
    """

    def __init__(self, sampler: Sized[Any]) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        epoch = 0
        while True:
            set_epoch = getattr(self._sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            yield from self._sampler
            epoch += 1


class DistributedSampler(Sampler[Any]):
    """Take every ``num_replicas``-th item, beginning with item ``rank``.

    Args:
        sampler: The same items in the same order on every rank.
        num_replicas: Data-parallel world size.
        rank: Data-parallel rank.

    Raises:
        ValueError: If the rank is not one of the replicas.

    Example:
        >>> sampler = zerotrial.samplers.DistributedSampler([10, 11, 12], num_replicas=2, rank=1)
        >>> list(sampler)
        [11]
    """

    def __init__(self, sampler: Sized[Any], num_replicas: int, rank: int) -> None:
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(f"rank: must be in 0..num_replicas-1, got {rank} of {num_replicas}")
        self._sampler = sampler
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        quotient, remainder = divmod(len(self._sampler), self._num_replicas)
        return quotient + (remainder > self._rank)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._rank, None, self._num_replicas)


class SkipSampler(Sampler[Any]):
    """Skip the first items of the first pass.

    Later passes are complete. Its length is that of a complete pass.

    Args:
        sampler: Any re-iterable collection with a length.
        skip: Number of items to skip.

    Raises:
        ValueError: If ``skip`` is negative.

    Example:
        >>> sampler = zerotrial.samplers.SkipSampler([0, 1, 2], skip=2)
        >>> list(sampler), list(sampler)
        ([2], [0, 1, 2])
    """

    def __init__(self, sampler: Sized[Any], skip: int) -> None:
        if skip < 0:
            raise ValueError(f"skip: must be >= 0, got {skip}")
        self._sampler = sampler
        self._skip = skip

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self._sampler), skip, None)


class ReproducibleShuffleSampler(Sampler[Any]):
    """Shuffle reproducibly, with a new order in each pass.

    The order depends only on the seed and the number of the pass, so it is the same on every rank.

    Args:
        sampler: Items to shuffle.
        seed: Seed of the order, usually ``context.get_trial_seed()``.

    Example:
        >>> sampler = zerotrial.samplers.ReproducibleShuffleSampler(range(4), seed=1)
        >>> sorted(sampler)
        [0, 1, 2, 3]
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._items: Sequence[Any] = (
            sampler if isinstance(sampler, range) else list(sampler)  # a range costs nothing
        )
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._items)

    def set_epoch(self, epoch: int) -> None:
        """Set the pass that the next ``iter()`` starts.

        Args:
            epoch: Number of the pass, from 0.

        Example:
            >>> sampler = zerotrial.samplers.ReproducibleShuffleSampler(range(9), seed=1)
            >>> first = list(sampler)
            >>> sampler.set_epoch(0)
            >>> list(sampler) == first
            True
        """
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self._epoch))
        self._epoch += 1
        order = torch.randperm(len(self._items), generator=generator).tolist()
        return (self._items[index] for index in order)


class RepeatBatchSampler(RepeatSampler):
    """:class:`RepeatSampler` over batches of indices.

    Args:
        sampler: Batches of indices, with a length.

    Example:
        >>> from itertools import islice
        >>> list(islice(zerotrial.samplers.RepeatBatchSampler([[0, 1], [2, 3]]), 3))
        [[0, 1], [2, 3], [0, 1]]
    """


class DistributedBatchSampler(DistributedSampler):
    """:class:`DistributedSampler` over batches of indices.

    Args:
        sampler: The same batches in the same order on every rank.
        num_replicas: Data-parallel world size.
        rank: Data-parallel rank.

    Example:
        >>> batches = [[0, 1], [2, 3]]
        >>> sampler = zerotrial.samplers.DistributedBatchSampler(batches, num_replicas=2, rank=0)
        >>> list(sampler)
        [[0, 1]]
    """


class SkipBatchSampler(SkipSampler):
    """:class:`SkipSampler` over batches of indices.

    Args:
        sampler: Batches of indices, with a length.
        skip: Number of batches to skip.

    Example:
        >>> list(zerotrial.samplers.SkipBatchSampler([[0, 1], [2, 3]], skip=1))
        [[2, 3]]
    """


class ReproducibleShuffleBatchSampler(ReproducibleShuffleSampler):
    """:class:`ReproducibleShuffleSampler` over batches of indices.

    Args:
        sampler: Batches of indices.
        seed: Seed of the order.

    Example:
        >>> batches = [[0, 1], [2, 3]]
        >>> sorted(zerotrial.samplers.ReproducibleShuffleBatchSampler(batches, seed=1))
        [[0, 1], [2, 3]]
    """
