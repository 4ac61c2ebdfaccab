"""What the ranks of a checkpoint tell each other, and how one rank's error reaches all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist

from zerotrial.engine.checkpoint.files import CheckpointError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The data-parallel ranks; one process without torch.distributed is rank 0 of 1.

    Args:
        group: Of the ranks; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Give every rank what each rank has, in rank order. **Collective**."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return cast("list[T]", values)

    def first(self, value: T) -> T:
        """Give every rank what rank 0 has. **Collective**."""
        if self._group is None:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return cast("T", values[0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Fail on every rank if the block fails on any. **Collective** at the end of the block.

        The block itself must hold no collective.

        Raises:
            CheckpointError: On ranks whose own block was fine.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below, once all ranks know
            error = caught
        texts = self.gather(None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                msg = f"rank {rank}: {text}"
                raise CheckpointError(msg)
