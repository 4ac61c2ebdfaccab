"""The loader that ``initialize(training_data=...)`` returns."""

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
    """Micro-batches of this rank's share of a dataset, in a new order each epoch.

    Args:
        loader: Over one epoch.
        sampler: Whose ``set_epoch`` chooses the order; None for iterable datasets.
        samples: Of one micro-batch, over all ranks.
        speaks: Whether this rank says where a checkpoint has moved it.
        reading: Around the reading of each micro-batch.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        sampler: "_Sampler | None",
        samples: int,
        *,
        speaks: bool = True,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.epoch = 0
        """The next one."""

        self._loader = loader
        self._sampler = sampler
        self._samples = samples
        self._speaks = speaks
        self._reading = reading
        self._running = False
        self._taken = 0  # micro-batches of the running epoch
        self._skip = 0  # micro-batches that a checkpoint has seen of the next epoch

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return len(self._loader)

    @property
    def batch_size(self) -> int | None:
        """Samples of a micro-batch of this rank."""
        return self._loader.batch_size

    @property
    def dataset(self) -> "Dataset[Any]":
        """What it reads, of all ranks."""
        return self._loader.dataset

    @property
    def sampler(self) -> "DistributedSampler[Any] | None":
        """What chooses this rank's samples; None for iterable datasets."""
        return self._sampler

    def __iter__(self) -> Iterator[Any]:
        """Run through the next epoch."""
        self._running, self._taken, self._skip = True, self._skip, 0
        skipped = self._taken
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
            self._sampler.skip = skipped * (self._loader.batch_size or 1)
            skipped = 0
        self.epoch += 1
        batches = islice(self._loader, skipped, None)
        while True:
            with self._reading():
                batch = next(batches, _END)
            if batch is _END:
                return
            self._taken += 1
            yield batch

    def forever(self) -> Iterator[Any]:
        """One iterator over epoch after epoch, the same at each call."""
        if not hasattr(self, "_endless"):
            self._endless = self._repeat()
        return self._endless

    def state_dict(self) -> dict[str, Any]:
        """Where the running epoch is; counted in samples, so that other ranks may go on."""
        taken = self._taken if self._running else self._skip
        return {"epoch": self.epoch - self._running, "samples": taken * self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the next sample; iterators that were begun before are done with."""
        self.epoch = int(state["epoch"])
        self._skip = int(state["samples"]) // self._samples
        self._running = False
        if self._sampler is not None and self._skip >= len(self):
            self.epoch, self._skip = self.epoch + 1, 0
        vars(self).pop("_endless", None)
        # A warning: scripts for DeepSpeed skip once more, and training goes on without a sign.
        if self._speaks and (self._skip or self.epoch):
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
    """May begin in the middle of an epoch, without reading what was before."""

    skip = 0
    """Samples of this rank."""

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
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> EngineLoader:
    """Divide a dataset over the ranks and shuffle it anew each epoch; see ``DataLoader``."""
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
        loader, sampler, batch.micro * batch.dp_world_size, speaks=rank == 0, reading=reading
    )
