"""The loader that ``initialize(training_data=...)`` returns."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zerolab.config.batch import BatchSizes
from zerolab.config.engine import EngineConfig

__all__ = ["EngineLoader", "build_loader"]


class EngineLoader:
    """Micro-batches of this rank's share of a dataset, in a new order each epoch.

    Args:
        loader: Over one epoch.
        sampler: Whose ``set_epoch`` chooses the order; None for iterable datasets.
    """

    def __init__(
        self, loader: "DataLoader[Any]", sampler: "DistributedSampler[Any] | None"
    ) -> None:
        self.epoch = 0
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Run through the next epoch."""
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        yield from self._loader

    def forever(self) -> Iterator[Any]:
        """One iterator over epoch after epoch, the same at each call."""
        if not hasattr(self, "_endless"):
            self._endless = self._repeat()
        return self._endless

    def _repeat(self) -> Iterator[Any]:
        while True:
            yield from self


def build_loader(
    data: "Dataset[Any]",
    config: EngineConfig,
    batch: BatchSizes,
    rank: int,
    collate_fn: Callable[[Any], Any] | None,
) -> EngineLoader:
    """Divide a dataset over the ranks and shuffle it anew each epoch."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(
            data,
            num_replicas=batch.dp_world_size,
            rank=rank,
            shuffle=True,
            drop_last=config.dataloader_drop_last,
        )
    loader = DataLoader(
        data,
        batch_size=batch.micro,
        sampler=sampler,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
    )
    return EngineLoader(loader, sampler)
