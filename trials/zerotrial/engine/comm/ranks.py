"""Exchange of small Python values over a process group of ``torch.distributed``."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zerolab.ranks import Ranks

__all__ = ["GroupRanks"]

T = TypeVar("T")


class GroupRanks(Ranks):
    """Ranks of a process group; one process without torch.distributed is rank 0 of 1.

    Args:
        group: Process group; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def allgather(self, value: T, operation: str = "allgather") -> list[T]:
        """Return the values of all ranks. **Collective**.

        Args:
            value: Any object that can be pickled.
            operation: Name of the exchange, for errors.

        Returns:
            The values in the order of ranks.

        Raises:
            CollectiveError: If a rank does not take part in time.

        Example:
            >>> zerotrial.Distributed().allgather(0.5)
            [0.5]
        """
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        group = self._group
        self._exchange(operation, lambda: dist.all_gather_object(values, value, group=group))
        return values

    def broadcast(self, value: T, operation: str = "broadcast", *, src: int = 0) -> T:
        """Return one rank's value on every rank. **Collective**.

        Args:
            value: Any object that can be pickled; ignored on other ranks.
            operation: Name of the exchange, for errors.
            src: Rank whose value is sent; the chief by default.

        Returns:
            The value of rank ``src``.

        Raises:
            CollectiveError: If a rank does not take part in time.

        Example:
            >>> zerotrial.Distributed().broadcast("run-7")
            'run-7'
        """
        if self._group is None:
            return value
        box: list[Any] = [value]
        group = self._group
        self._exchange(
            operation, lambda: dist.broadcast_object_list(box, group=group, group_src=src)
        )
        received: T = box[0]
        return received

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until every rank has called this. **Collective**.

        Args:
            operation: Name of the exchange, for errors.

        Raises:
            CollectiveError: If a rank does not take part in time.

        Example:
            >>> zerotrial.Distributed().barrier()
        """
        if self._group is not None:
            group = self._group
            self._exchange(operation, lambda: dist.barrier(group=group))

    def _exchange(self, operation: str, run: Callable[[], Any]) -> None:
        """Run a collective; subclasses may add details to its errors."""
        run()
