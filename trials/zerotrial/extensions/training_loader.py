"""Training loader returned by ``initialize(training_data=...)``."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig

__all__ = ["EngineLoader", "build_loader"]

logger = logging.getLogger(__name__)
_END = object()


class EngineLoader:
    """Loader of this rank's micro-batches, shuffled in each epoch.

    Args:
        loader: Loader of one epoch.
        sampler: Sampler with ``set_epoch``; None for iterable datasets.
        samples: Number of samples of one micro-batch, over all ranks.
        speaks: Whether this rank logs the position after a load.
        reading: Context for reading a micro-batch.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        sampler: "_Sampler | None",
        samples: int,
        *,
        logs: bool = True,
        read_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.epoch = 0
        """Index of the next epoch."""

        self._loader = loader
        self._sampler = sampler
        self._samples = samples
        self._logs = logs
        self._read_context = read_context
        self._running = False
        self._consumed = 0  # micro-batches returned in the current epoch
        self._skip = 0  # micro-batches of the next epoch to skip after a load

    def __len__(self) -> int:
        """Return the number of micro-batches per epoch."""
        return len(self._loader)

    @property
    def batch_size(self) -> int | None:
        """Number of samples of this rank's micro-batch."""
        return self._loader.batch_size

    @property
    def dataset(self) -> "Dataset[Any]":
        """Dataset of all ranks."""
        return self._loader.dataset

    @property
    def sampler(self) -> "DistributedSampler[Any] | None":
        """Sampler of this rank; None for iterable datasets."""
        return self._sampler

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch."""
        self._running, self._consumed, self._skip = True, self._skip, 0
        skipped = self._consumed
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
            self._sampler.skip = skipped * (self._loader.batch_size or 1)
            skipped = 0
        self.epoch += 1
        batches = islice(self._loader, skipped, None)
        while True:
            with self._read_context():
                batch = next(batches, _END)
            if batch is _END:
                return
            self._consumed += 1
            yield batch

    def forever(self) -> Iterator[Any]:
        """Return an iterator over endless epochs, the same one at each call."""
        if not hasattr(self, "_endless"):
            self._endless = self._repeat()
        return self._endless

    def state_dict(self) -> dict[str, Any]:
        """Return the position, counted in samples so that other numbers of ranks can resume."""
        consumed = self._consumed if self._running else self._skip
        return {"epoch": self.epoch - self._running, "samples": consumed * self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the next sample; existing iterators become invalid."""
        self.epoch = int(state["epoch"])
        self._skip = int(state["samples"]) // self._samples
        self._running = False
        if self._sampler is not None and self._skip >= len(self):
            self.epoch, self._skip = self.epoch + 1, 0
        vars(self).pop("_endless", None)
        # A warning: DeepSpeed scripts may skip again, which would go unnoticed.
        if self._logs and (self._skip or self.epoch):
            logger.warning(
                "the checkpoint has moved the training loader to micro-batch %d of epoch %d, both "
                "counted from 0; do not skip again",
                self._skip,
                self.epoch,
            )

    def _repeat(self) -> Iterator[Any]:
        while True:
            yield from self


class _Sampler(DistributedSampler[Any]):
    """Sampler that can start in the middle of an epoch without reading the skipped samples."""

    skip = 0
    """Number of this rank's samples to skip."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.skip, None)


def build_loader(
    data: "Dataset[Any]",
    config: EngineConfig,
    batch: BatchSizes,
    rank: int,
    collate_fn: Callable[[Any], Any] | None,
    *,
    pin_memory: bool = False,
    read_context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> EngineLoader:
    """Return a loader of this rank's share of a dataset, shuffled in each epoch."""
    sampler: _Sampler | None = None
    if not isinstance(data, IterableDataset):
        sampler = _Sampler(
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
        pin_memory=pin_memory,
    )
    return EngineLoader(
        loader,
        sampler,
        batch.micro * batch.dp_world_size,
        logs=rank == 0,
        read_context=read_context,
    )
