"""Transport buffers that collectives use in turn, each again when no rank reads it any more."""

from collections import deque

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator, Work

__all__ = ["Ring"]


class Ring:
    """A few buffers of bytes; the *turn* is that of the one which the next collective uses.

    Args:
        comm: Allocates; every rank must ask for the same sizes in the same order.
        device: Of the buffers.
        count: How many.
        works: Collectives under way, oldest first, which go on in this order on every rank. The
            caller adds to it.
        nbytes: Of each buffer; 0: made when first lent, and anew where more is wanted.
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
        made = range(count if nbytes else 0)
        self._buffers = [comm.allocate(nbytes, torch.uint8, device) for _ in made]
        self._users: list[Work | None] = [None] * count
        self._turn = 0

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's memory."""
        return [buffer.tensor for buffer in self._buffers]

    def is_free(self, ahead: int) -> bool:
        """Whether the buffer that comes ``ahead`` turns from now can be written to at once."""
        if ahead >= self._count:
            return False
        user = self._users[(self._turn + ahead) % self._count]
        return user is None or user.is_free()

    def wait(self) -> None:
        """Return when the buffer whose turn it is can be written to."""
        user, self._users[self._turn] = self._users[self._turn], None
        if user is None:
            return
        while self._works and not user.advance():  # in order, as the other ranks do
            self._works.popleft().wait()
        user.release()

    def lend(self, numel: int, dtype: torch.dtype, ahead: int = 0) -> Buffer:
        """Lend a buffer that is free. **Collective** where it must be made.

        Args:
            numel: Elements, N * S.
            dtype: Of the elements.
            ahead: Turns from now.

        Returns:
            Its first elements, with arbitrary content.
        """
        nbytes = numel * dtype.itemsize
        turn = (self._turn + ahead) % self._count
        if turn == len(self._buffers):
            self._buffers.append(self._comm.allocate(nbytes, torch.uint8, self._device))
        elif self._buffers[turn].tensor.numel() < nbytes:
            self._buffers[turn] = self._comm.allocate(nbytes, torch.uint8, self._device)
        return self._buffers[turn].part(0, nbytes).cast(dtype)

    def pass_on(self, work: Work) -> None:
        """End the turn of the buffer that ``work`` reads."""
        self._users[self._turn] = work
        self._turn = (self._turn + 1) % self._count
