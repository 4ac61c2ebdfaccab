"""Ring of transport buffers that collectives reuse in turn."""

from collections import deque

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator, Work

__all__ = ["Ring"]


class Ring:
    """Buffers of bytes in a ring; the *turn* is the index of the next collective's buffer.

    Args:
        comm: Allocator; every rank must request the same sizes in the same order.
        device: Device of the buffers.
        count: Number of buffers.
        works: Collectives in progress, oldest first, in the same order on every rank. The
            caller appends to it.
        nbytes: Size of each buffer; 0 allocates on first use and again for larger requests.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        count: int,
        works: deque[Work],
        nbytes: int = 0,
    ) -> None:
        self._comm = comm
        self._device = device
        self._count = count
        self._works = works
        preallocated = range(count if nbytes else 0)
        self._buffers = [comm.allocate(nbytes, torch.uint8, device) for _ in preallocated]
        self._users: list[Work | None] = [None] * count
        self._turn = 0

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's buffers."""
        return [buffer.tensor for buffer in self._buffers]

    def is_free(self, ahead: int) -> bool:
        """Return whether the buffer ``ahead`` turns from now can be written at once."""
        if ahead >= self._count:
            return False
        user = self._users[(self._turn + ahead) % self._count]
        return user is None or user.is_free()

    def wait(self) -> None:
        """Wait until the buffer of the current turn can be written."""
        user, self._users[self._turn] = self._users[self._turn], None
        if user is None:
            return
        # Ranks finish collectives in the same order, or each would wait for another one's.
        while self._works and not user.advance():
            self._works.popleft().wait()
        user.release()

    def get(self, numel: int, dtype: torch.dtype, ahead: int = 0) -> Buffer:
        """Return a free buffer. **Collective** if it must be allocated.

        Args:
            numel: Number of elements, N * S.
            dtype: Type of the elements.
            ahead: Number of turns from now.

        Returns:
            The buffer's first elements, uninitialized.
        """
        nbytes = numel * dtype.itemsize
        turn = (self._turn + ahead) % self._count
        if turn == len(self._buffers):
            self._buffers.append(self._comm.allocate(nbytes, torch.uint8, self._device))
        elif self._buffers[turn].tensor.numel() < nbytes:
            self._buffers[turn] = self._comm.allocate(nbytes, torch.uint8, self._device)
        return self._buffers[turn].part(0, nbytes).cast(dtype)

    def advance_turn(self, work: Work) -> None:
        """End the current turn; ``work`` reads its buffer."""
        self._users[self._turn] = work
        self._turn = (self._turn + 1) % self._count
