"""Collectives between CPU ranks of one host: data in shared memory, signals over sockets.

Each rank's buffers are anonymous memory files (``memfd``) whose descriptors are passed to the other
ranks, which map them and read each other's data in place. The files never have a name, so nothing
can be left behind, however a rank ends. Signals are 16-byte tokens on Unix stream sockets with
abstract names: the kernel orders memory around them, a waiting rank sleeps, and a rank that dies
closes its sockets, which the others notice at once.

A collective is a fixed sequence of phases; in each, a rank tells every peer that it got there and
goes on when all peers have said so:

    reduce_scatter   READY (my buffer is full)  -> sum my shard -> SUMMED (yours is free)
    all_gather       READY (my shard is final)  -> copy the other shards
    all_reduce       READY -> sum my shard -> SUMMED -> copy the other shards
    fence, sum       READY
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.engine.comm import Buffer, Traffic, Work

__all__ = ["PeerError", "SharedMemoryCommunicator", "connect_shared_memory"]

_TOKEN = struct.Struct("<BBHIQ")  # phase, collective, unused, sequence number, elements
_HELLO = struct.Struct("<II")  # rank, channel
_READY, _SUMMED = 0, 1
_KINDS = ("fence", "sum", "reduce_scatter", "all_reduce", "all_gather", "broadcast", "allocate")
_CHUNK = 1 << 16  # elements: 256 KB of fp32 stay in a core's cache
_BOARD = 64  # fp64 numbers that `sum` can add up
_PATIENCE_S = 60.0  # for the others to call connect_shared_memory

_Step = Callable[[], None]  # what a collective does after a phase


class PeerError(RuntimeError):
    """Another rank died, stopped answering, or called another collective."""


class SharedMemoryCommunicator:
    """See :class:`~zerotrial.engine.comm.Communicator`; made by :func:`connect_shared_memory`.

    Args:
        rank: Of this process among the peers.
        size: Number of ranks.
        wires: A connected stream socket for each other rank, for tokens.
        controls: Another, for file descriptors.
        timeout_s: Seconds to wait for a peer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        wires: dict[int, socket.socket],
        controls: dict[int, socket.socket],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._wires = _Wires(rank, wires, controls, timeout_s)
        self._rounds = 0
        self._boards = self.allocate(2 * _BOARD, torch.float64, torch.device("cpu"))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        assert device.type == "cpu"
        nbytes = max(numel * dtype.itemsize, 1)
        fd = os.memfd_create("zerolab")
        try:
            os.ftruncate(fd, nbytes)
            mine = _map(fd, nbytes)
            descriptors = self._wires.swap_descriptors(fd, nbytes)
        finally:
            os.close(fd)
        peers = []
        for rank in range(self.size):
            if rank == self.rank:
                peers.append(mine[: numel * dtype.itemsize].view(dtype))
                continue
            theirs = _map(descriptors[rank], nbytes)
            os.close(descriptors[rank])
            peers.append(theirs[: numel * dtype.itemsize].view(dtype))
        return Buffer(peers[self.rank], peers)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        self.traffic.add("reduce_scatter", buffer.tensor.numel())
        number = self._wires.begin("reduce_scatter", buffer.tensor.numel())

        def finish() -> None:
            self._sum_shard(buffer, out, factor, add=add)
            self._wires.tell(_SUMMED, number)

        return self._start(number, [(_READY, finish)])

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        self.traffic.add("all_reduce", 2 * buffer.tensor.numel())
        number = self._wires.begin("all_reduce", buffer.tensor.numel())

        def add_up() -> None:
            own = _shard(buffer.tensor, self.rank, self.size)
            self._sum_shard(buffer, own, factor, add=False)
            self._wires.tell(_SUMMED, number)

        return self._start(number, [(_READY, add_up), (_SUMMED, lambda: self._copy(buffer))])

    def all_gather(self, buffer: Buffer) -> Work:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        self.traffic.add("all_gather", buffer.tensor.numel())
        number = self._wires.begin("all_gather", buffer.tensor.numel())
        return self._start(number, [(_READY, lambda: self._copy(buffer))])

    def sum(self, values: Tensor) -> Tensor:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        count = values.numel()
        assert count <= _BOARD
        # Two boards in turn: when a rank writes one again, all others have read it, since they
        # have meanwhile taken part in the round that used the other.
        self._rounds += 1
        start = (self._rounds % 2) * _BOARD
        self._boards.tensor[start : start + count].copy_(values)
        self._meet("sum", count)
        total = self._boards.peers[0][start : start + count].clone()
        for board in self._boards.peers[1:]:
            total += board[start : start + count]
        return total

    def broadcast(self, tensor: Tensor) -> None:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        shared = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        if self.rank == 0:
            shared.tensor.copy_(tensor.reshape(-1))
        self._meet("broadcast", tensor.numel())
        if self.rank != 0:
            tensor.copy_(shared.peers[0].view(tensor.shape))

    def fence(self) -> None:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        self._meet("fence", 0)

    def close(self) -> None:
        """See :class:`~zerotrial.engine.comm.Communicator`."""
        self._wires.close()

    def _meet(self, kind: str, elements: int) -> None:
        number = self._wires.begin(kind, elements)
        self._wires.tell(_READY, number)
        self._wires.await_all(_READY, number)

    def _start(self, number: int, steps: list[tuple[int, _Step]]) -> Work:
        self._wires.tell(_READY, number)
        return _SharedWork(self._wires, number, deque(steps))

    def _sum_shard(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> None:
        """Add up every rank's copy of this rank's shard, own first, then in rank order."""
        own = _shard(buffer.tensor, self.rank, self.size)
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        others = [_shard(buffer.peers[rank], self.rank, self.size) for rank in sorted(order)]
        for start in range(0, own.numel(), _CHUNK):
            cut = slice(start, start + _CHUNK)
            _sum_chunk(out[cut], own[cut], [other[cut] for other in others], factor, add=add)

    def _copy(self, buffer: Buffer) -> None:
        for step in range(1, self.size):  # each rank starts with another, to spread the load
            rank = (self.rank + step) % self.size
            theirs = _shard(buffer.peers[rank], rank, self.size)
            _shard(buffer.tensor, rank, self.size).copy_(theirs)


def _sum_chunk(
    out: Tensor, own: Tensor, others: Sequence[Tensor], factor: float, *, add: bool
) -> None:
    if own.dtype in {torch.bfloat16, torch.float16}:  # sums in fp32, rounded once
        total = own.float()
        for other in others:
            total.add_(other.float())
    elif add or out.data_ptr() != own.data_ptr():
        total = own + others[0]
        for other in others[1:]:
            total.add_(other)
    else:
        total = out
        for other in others:
            total.add_(other)
    if add:
        out.add_(total, alpha=factor)
        return
    if factor != 1.0:
        total.mul_(factor)
    if total is not out:
        out.copy_(total)


class _SharedWork:
    """A collective under way: phases still to be awaited, each with what follows it."""

    def __init__(self, wires: "_Wires", number: int, steps: deque[tuple[int, _Step]]) -> None:
        self._wires = wires
        self._number = number
        self._steps = steps

    def advance(self) -> bool:
        while self._steps:
            phase, then = self._steps[0]
            if not self._wires.all_there(phase, self._number):
                return False
            self._steps.popleft()
            then()
        return True

    def wait(self) -> None:
        while self._steps:
            phase, then = self._steps.popleft()
            self._wires.await_all(phase, self._number)
            then()

    def release(self) -> None:
        self._wires.await_all(_SUMMED, self._number)


class _Wires:
    """Sockets to all peers, and the book of who has reached which phase of which collective."""

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        controls: dict[int, socket.socket],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._sockets = sockets
        self._controls = controls
        self._timeout_s = timeout_s
        self._began = 0
        self._names: dict[int, tuple[int, int]] = {}  # number -> kind, elements; of late ones
        # The number of the last collective in which a peer reached a phase. Phases of one kind
        # come in the order of the collectives, so one number says it all; a phase that a
        # collective does not have is passed with the next one that has it.
        self._reached = {peer: [0, 0] for peer in self._sockets}
        self._heard: dict[int, deque[tuple[int, int, int]]] = {p: deque() for p in self._sockets}
        self._partial = dict.fromkeys(self._sockets, b"")
        self._gone: set[int] = set()
        self._poll = select.poll()
        for wire in self._sockets.values():
            wire.settimeout(0)
            self._poll.register(wire, select.POLLIN)
        _OPEN.add(self)
        self._by_fd = {wire.fileno(): peer for peer, wire in self._sockets.items()}

    def begin(self, kind: str, elements: int) -> int:
        """Open the book for the next collective; its number."""
        self._began += 1
        self._names[self._began] = (_KINDS.index(kind), elements)
        self._names.pop(self._began - 256, None)
        for peer, heard in self._heard.items():
            while heard and heard[0][0] <= self._began:
                self._compare(peer, *heard.popleft())
        return self._began

    def tell(self, phase: int, number: int) -> None:
        """Tell every peer that this rank has reached a phase."""
        kind, elements = self._names[number]
        token = _TOKEN.pack(phase, kind, 0, number, elements)
        for peer, wire in self._sockets.items():
            try:
                self._send(wire, token)
            except (BrokenPipeError, ConnectionResetError):
                self._gone.add(peer)  # what it said before may explain why: see await_all

    def _send(self, wire: socket.socket, data: bytes) -> None:
        while data:
            try:
                data = data[wire.send(data) :]
            except BlockingIOError:  # the peer is thousands of tokens behind
                select.select([], [wire], [], self._timeout_s)

    def all_there(self, phase: int, number: int) -> bool:
        """Whether every peer has reached a phase; never waits."""
        if self._missing(phase, number):
            self._listen(0)
            return not self._missing(phase, number)
        return True

    def await_all(self, phase: int, number: int) -> None:
        """Wait until every peer has reached a phase.

        Raises:
            PeerError: If one died, or did not come within the timeout.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._missing(phase, number):
            self._listen(0)
            missing = self._missing(phase, number)
            for peer in missing:
                if peer in self._gone:
                    raise self._death(peer, number)
            left = deadline - time.monotonic()
            if missing and left <= 0:
                who = ", ".join(str(peer) for peer in missing)
                msg = (
                    f"{self._describe(number)}: rank {who} has not called it within "
                    f"{self._timeout_s:g} s; this is rank {self._rank}"
                )
                raise PeerError(msg)
            if missing:
                self._listen(left)

    def _missing(self, phase: int, number: int) -> list[int]:
        return [peer for peer, reached in self._reached.items() if reached[phase] < number]

    def _listen(self, wait_s: float) -> None:
        for fd, _ in self._poll.poll(wait_s * 1000):
            peer = self._by_fd[fd]
            try:
                data = self._sockets[peer].recv(1 << 14)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                self._gone.add(peer)
                self._poll.unregister(fd)
                continue
            self._read(peer, self._partial[peer] + data)

    def _read(self, peer: int, data: bytes) -> None:
        whole = len(data) - len(data) % _TOKEN.size
        for phase, kind, _, number, elements in _TOKEN.iter_unpack(data[:whole]):
            self._reached[peer][phase] = number
            if number <= self._began:
                self._compare(peer, number, kind, elements)
            else:
                self._heard[peer].append((number, kind, elements))
        self._partial[peer] = data[whole:]

    def _compare(self, peer: int, number: int, kind: int, elements: int) -> None:
        mine = self._names.get(number)
        if mine is not None and mine != (kind, elements):
            msg = (
                f"{self._describe(number)}: rank {peer} called {_KINDS[kind]} of {elements} "
                "elements instead; all ranks must make the same engine calls in the same order"
            )
            raise PeerError(msg)

    def _describe(self, number: int) -> str:
        kind, elements = self._names[number]
        return f"collective {number}, {_KINDS[kind]} of {elements} elements"

    def _death(self, peer: int, number: int) -> PeerError:
        return PeerError(
            f"{self._describe(number)}: rank {peer} has ended or closed its engine; "
            f"this is rank {self._rank}"
        )

    def swap_descriptors(self, fd: int, nbytes: int) -> dict[int, int]:
        """Give every peer a file descriptor and take theirs."""
        number = self.begin("allocate", nbytes)
        self.tell(_READY, number)
        self.await_all(_READY, number)
        for control in self._controls.values():
            socket.send_fds(control, [b"f"], [fd])
        taken: dict[int, int] = {}
        for peer, control in self._controls.items():
            control.settimeout(self._timeout_s)
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                raise self._death(peer, number)
            taken[peer] = descriptors[0]
        return taken

    def close(self) -> None:
        for wire in (*self._sockets.values(), *self._controls.values()):
            wire.close()


_OPEN: "weakref.WeakSet[_Wires]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked data-loading worker must not keep a dead rank's sockets open."""
    for wires in list(_OPEN):
        wires.close()


os.register_at_fork(after_in_child=_close_in_child)


def _shard(tensor: Tensor, rank: int, size: int) -> Tensor:
    numel = tensor.numel() // size
    return tensor[rank * numel : (rank + 1) * numel]


def _map(fd: int, nbytes: int) -> Tensor:
    """Map a file for reading and writing; the mapping ends with the last view of the tensor."""
    path = f"/proc/self/fd/{fd}"
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def connect_shared_memory(group: dist.ProcessGroup) -> SharedMemoryCommunicator | None:
    """Connect the ranks of a group, if they are all on this host. **Collective**.

    Returns:
        None, on every rank alike, where it cannot be done: other hosts, other systems than Linux, a
        sandbox that forbids it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, name = _listen()
    names: list[tuple[str, str]] = [("", "")] * size
    dist.all_gather_object(names, (_host(), name), group=group)
    possible = listener is not None and len({host for host, _ in names}) == 1
    wires: dict[int, socket.socket] = {}
    controls: dict[int, socket.socket] = {}
    connected = False
    if possible and all(address for _, address in names):
        assert listener is not None
        with contextlib.suppress(OSError):
            _mesh(rank, [address for _, address in names], listener, (wires, controls))
            connected = True
    if listener is not None:
        listener.close()
    outcomes = [False] * size
    dist.all_gather_object(outcomes, connected, group=group)
    if not all(outcomes):
        for wire in (*wires.values(), *controls.values()):
            wire.close()
        return None
    return SharedMemoryCommunicator(rank, size, wires, controls, _timeout_of(group))


def _listen() -> tuple["socket.socket | None", str]:
    """Open a socket under a name that only the group is told; no file is made."""
    if sys.platform != "linux" or not Path("/proc/self/fd").is_dir():
        return None, ""
    name = f"\0zerolab-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("zerolab"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(64)
        listener.settimeout(_PATIENCE_S)
    except OSError:
        return None, ""
    return listener, name


def _host() -> str:
    """Name the kernel and the network namespace, within which abstract sockets are seen."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return secrets.token_hex(8)  # unknown: unlike any other


def _mesh(
    rank: int,
    names: Sequence[str],
    listener: socket.socket,
    channels: Sequence[dict[int, socket.socket]],
) -> None:
    """Connect every channel to every rank below, accept every rank above."""
    for peer in range(rank):
        for channel, sockets in enumerate(channels):
            wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer] = wire
            wire.settimeout(_PATIENCE_S)
            wire.connect(names[peer])
            wire.sendall(_HELLO.pack(rank, channel))
    for _ in range((len(names) - 1 - rank) * len(channels)):
        wire, _address = listener.accept()
        wire.settimeout(_PATIENCE_S)
        peer, channel = _HELLO.unpack(wire.recv(_HELLO.size, socket.MSG_WAITALL))
        channels[channel][peer] = wire


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the group's own collectives give up."""
    try:
        options = group._get_backend(torch.device("cpu")).options  # noqa: SLF001 - no public way
        return float(options._timeout.total_seconds())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return 1800.0
