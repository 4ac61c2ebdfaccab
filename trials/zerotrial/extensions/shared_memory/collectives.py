"""Collectives between CPU ranks of one host: data in shared memory, signals over sockets.

Each rank's buffers are anonymous memory files (``memfd``). Their descriptors are passed to the
other ranks, which map them and read each other's data in place. The files have no name, so nothing
remains however a rank ends. Signals are 16-byte tokens on Unix stream sockets with abstract names.
The kernel orders memory around them, a waiting rank sleeps, and a rank that dies closes its
sockets, which its peers notice at once.

A collective is a fixed sequence of phases. In each phase a rank signals all peers, and continues
when all of them have signalled:

    reduce_scatter   READY (my buffer is full)  -> sum my shard -> SUMMED (yours is free)
    all_gather       READY (my shard is final)  -> copy the other shards
    all_reduce       READY -> sum my shard -> SUMMED -> copy the other shards
    fence, sum       READY
"""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator, SharedBuffer, Work
from zerotrial.engine.memory.copy_on_write import map_copy_on_write
from zerotrial.extensions.shared_memory.peer_sockets import (
    READY,
    SUMMED,
    PeerSockets,
    connect_all,
    host_name,
    open_listener,
)

__all__ = ["SharedMemoryCommunicator", "connect_shared_memory"]

_CHUNK = 1 << 16  # elements: 256 KB of fp32 stay in a core's cache
_BOARD = 64  # fp64 numbers that `sum` can add up

_Step = Callable[[], None]  # continuation of a collective after a phase


class SharedMemoryCommunicator(Communicator):
    """Communicator created by :func:`connect_shared_memory`.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        wires: Connected stream socket to each other rank, for tokens.
        controls: Second socket to each other rank, for file descriptors.
        timeout_s: Seconds to wait for a peer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: dict[int, socket.socket],
        controls: dict[int, socket.socket],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._sockets = PeerSockets(rank, sockets, controls, timeout_s)
        self._rounds = 0
        self._boards = self.allocate(2 * _BOARD, torch.float64, torch.device("cpu"))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Allocate a zeroed buffer of ``numel`` elements."""
        assert device.type == "cpu"
        nbytes = max(numel * dtype.itemsize, 1)
        with self._memory_files(nbytes) as files:
            peers = [_map(fd, nbytes) for fd in files]
        peers = [memory[: numel * dtype.itemsize].view(dtype) for memory in peers]
        return Buffer(peers[self.rank], peers)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """Allocate one zeroed memory for all ranks."""
        nbytes = max(numel * dtype.itemsize, 1)
        with self._memory_files(nbytes) as files:
            return SharedBuffer(mmap(files[0], nbytes), dtype)

    def publish_shards(self, parameters: Any, meanwhile: _Step) -> Any:
        """Share the shards of a unit of stage 3, see :func:`published_shards.publish_shards`."""
        from zerotrial.extensions.shared_memory.published_shards import publish_shards

        return publish_shards(self, parameters, meanwhile)

    def share_copy_on_write(self, tensor: Tensor) -> Tensor:
        """Return rank 0's values in memory shared by all ranks, copy-on-write. **Collective**.

        A rank that writes to it gets private pages.

        Args:
            tensor: Tensor of the same shape and type on every rank; it is not changed.
        """
        if tensor.numel() == 0:
            return tensor.detach().clone()
        nbytes = tensor.numel() * tensor.element_size()
        with self._memory_files(nbytes) as files:
            if self.rank == 0:
                shared = _map(files[0], nbytes).view(tensor.dtype)
                shared.copy_(tensor.detach().reshape(-1))
            self._synchronize("fence", 0)  # from here on the file is read-only
            return map_copy_on_write(files[0], tensor.shape, tensor.dtype)

    @contextlib.contextmanager
    def _memory_files(self, nbytes: int) -> Iterator[list[int]]:
        """Create a memory file on every rank; yield the descriptors of all ranks."""
        files = {self.rank: os.memfd_create("zerolab")}
        try:
            os.ftruncate(files[self.rank], nbytes)
            files |= self._sockets.exchange_descriptors(files[self.rank], nbytes)
            yield [files[rank] for rank in range(self.size)]
        finally:
            for fd in files.values():
                os.close(fd)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Start: ``out = factor * sum over ranks of their shard of buffer (+ out)``."""
        self.traffic.add("reduce_scatter", buffer.tensor.numel())
        number = self._sockets.begin("reduce_scatter", buffer.tensor.numel())

        def finish() -> None:
            self._sum_shard(buffer, out, factor, add=add)
            self._sockets.signal_all(SUMMED, number)

        return self._start(number, [(READY, finish)])

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """Start: every rank's ``buffer = factor * sum over ranks``."""
        self.traffic.add("all_reduce", 2 * buffer.tensor.numel())
        number = self._sockets.begin("all_reduce", buffer.tensor.numel())

        def add_up() -> None:
            local_shard = _shard(buffer.tensor, self.rank, self.size)
            self._sum_shard(buffer, local_shard, factor, add=False)
            self._sockets.signal_all(SUMMED, number)

        return self._start(number, [(READY, add_up), (SUMMED, lambda: self._copy(buffer))])

    def all_gather(self, buffer: Buffer) -> Work:
        """Start: fill the other ranks' shards of ``buffer`` with their values."""
        self.traffic.add("all_gather", buffer.tensor.numel())
        number = self._sockets.begin("all_gather", buffer.tensor.numel())
        return self._start(number, [(READY, lambda: self._copy(buffer))])

    def sum(self, values: Tensor) -> Tensor:
        """Add a few fp64 numbers over ranks, in rank order; bitwise equal everywhere. Waits."""
        count = values.numel()
        assert count <= _BOARD
        # Two boards in turn. A rank writes a board again only after the round on the other board,
        # in which all ranks took part after reading this one: no further fence is needed.
        self._rounds += 1
        start = (self._rounds % 2) * _BOARD
        self._boards.tensor[start : start + count].copy_(values)
        self._synchronize("sum", count)
        total = self._boards.peers[0][start : start + count].clone()
        for board in self._boards.peers[1:]:
            total += board[start : start + count]
        return total

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to every rank, in place. Waits."""
        board = self._boards.cast(torch.uint8).part(0, _BOARD * 8)
        if 0 < tensor.numel() * tensor.element_size() <= _BOARD * 8:
            board = board.part(0, tensor.numel() * tensor.element_size()).cast(tensor.dtype)
            self._synchronize("fence", 0)  # all ranks have read the board's previous content
        else:
            board = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        if self.rank == 0:
            board.tensor.copy_(tensor.reshape(-1))
        self._synchronize("broadcast", tensor.numel())
        if self.rank != 0:
            tensor.copy_(board.peers[0].view(tensor.shape))
        self._synchronize("fence", 0)

    def fence(self) -> None:
        """Wait for all ranks; buffers of finished collectives may be reused afterwards."""
        self._synchronize("fence", 0)

    def close(self) -> None:
        """Release all resources."""
        self._sockets.close()

    def _synchronize(self, kind: str, elements: int) -> None:
        number = self._sockets.begin(kind, elements)
        self._sockets.signal_all(READY, number)
        self._sockets.wait_for_all(READY, number)

    def _start(self, number: int, steps: list[tuple[int, _Step]]) -> Work:
        self._sockets.signal_all(READY, number)
        return _SharedWork(self._sockets, number, deque(steps))

    def _sum_shard(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> None:
        """Sum every rank's copy of this rank's shard: local copy first, then in rank order."""
        # Every shard is summed by one rank only, in an order that does not depend on who arrived
        # first: so all ranks get the same bits, and so does a repeated run. Chunks stay in the
        # cache while all ranks' parts are added; a shard at a time would read `out` from memory
        # once for each rank. Peers may change their buffers only after SUMMED, so no copy of them
        # is needed.
        local = _shard(buffer.tensor, self.rank, self.size)
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        shards = [_shard(buffer.peers[rank], self.rank, self.size) for rank in sorted(order)]
        for start in range(0, local.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            _sum_chunk(
                out[chunk],
                local[chunk],
                [remote[chunk] for remote in shards],
                factor,
                add=add,
            )

    def _copy(self, buffer: Buffer) -> None:
        # Each rank starts at its neighbour, so that no rank's memory is read by all at once.
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            remote_shard = _shard(buffer.peers[rank], rank, self.size)
            _shard(buffer.tensor, rank, self.size).copy_(remote_shard)


def _sum_chunk(
    out: Tensor, local: Tensor, remote: Sequence[Tensor], factor: float, *, add: bool
) -> None:
    if local.dtype in {torch.bfloat16, torch.float16}:  # sums in fp32, rounded once
        total = local.float()
        for other in remote:
            total.add_(other.float())
    elif add:
        total = local + remote[0]
        for other in remote[1:]:
            total.add_(other)
    else:
        total = torch.add(local, remote[0], out=out)
        for other in remote[1:]:
            total.add_(other)
    if add:
        out.add_(total, alpha=factor)
        return
    if factor != 1.0:
        total.mul_(factor)
    if total is not out:
        out.copy_(total)


class _SharedWork(Work):
    """Collective in progress: the phases to wait for, each with its continuation."""

    def __init__(
        self, sockets: "PeerSockets", number: int, steps: deque[tuple[int, _Step]]
    ) -> None:
        self._sockets = sockets
        self._number = number
        self._steps = steps

    def advance(self) -> bool:
        while self._steps:
            phase, continuation = self._steps[0]
            if not self._sockets.have_all_reached(phase, self._number):
                return False
            self._steps.popleft()
            continuation()
        return True

    def wait(self) -> None:
        while self._steps:
            phase, continuation = self._steps.popleft()
            self._sockets.wait_for_all(phase, self._number)
            continuation()

    def release(self) -> None:
        self._sockets.wait_for_all(SUMMED, self._number)

    def is_free(self) -> bool:
        return not self._steps and self._sockets.have_all_reached(SUMMED, self._number)


def _shard(tensor: Tensor, rank: int, size: int) -> Tensor:
    numel = tensor.numel() // size
    return tensor[rank * numel : (rank + 1) * numel]


def _map(fd: int, nbytes: int) -> Tensor:
    """Map a file for reading and writing, until the tensor's last view is freed."""
    path = f"/proc/self/fd/{fd}"
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def connect_shared_memory(group: dist.ProcessGroup) -> SharedMemoryCommunicator | None:
    """Connect the ranks of a group if all of them are on this host. **Collective**.

    Returns:
        None, on every rank alike, if it is impossible: several hosts, a system other than
        Linux, or a sandbox that forbids it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, name = open_listener()
    names: list[tuple[str, str]] = [("", "")] * size
    dist.all_gather_object(names, (host_name(), name), group=group)
    possible = listener is not None and len({host for host, _ in names}) == 1
    sockets: dict[int, socket.socket] = {}
    controls: dict[int, socket.socket] = {}
    connected = False
    if possible and all(address for _, address in names):
        assert listener is not None
        with contextlib.suppress(OSError):
            connect_all(rank, [address for _, address in names], listener, (sockets, controls))
            connected = True
    if listener is not None:
        listener.close()
    outcomes = [False] * size
    dist.all_gather_object(outcomes, connected, group=group)
    if not all(outcomes):
        for wire in (*sockets.values(), *controls.values()):
            wire.close()
        return None
    return SharedMemoryCommunicator(rank, size, sockets, controls, _timeout_of(group))


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group's collectives, in seconds."""
    try:
        options = group._get_backend(torch.device("cpu")).options  # noqa: SLF001 - no public way
        return float(options._timeout.total_seconds())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return 1800.0
