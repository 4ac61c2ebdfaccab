"""Signals between the ranks of one host: tokens on Unix sockets, and the book of who is where.

A token says that a rank has reached a phase of a collective. The kernel orders memory around it, a
waiting rank sleeps, and a rank that dies closes its sockets, which the others notice at once. The
sockets have abstract names, which no file stands for.
"""

import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

__all__ = ["READY", "SUMMED", "PeerError", "Wires", "connect_all", "host_name", "open_listener"]

_TOKEN = struct.Struct("<BBHIQ")  # phase, collective, unused, sequence number, elements
_HELLO = struct.Struct("<II")  # rank, channel
_KINDS = ("fence", "sum", "reduce_scatter", "all_reduce", "all_gather", "broadcast", "allocate")
_REMEMBERED = 1 << 14  # collectives; more than can be under way at a time
_PATIENCE_S = 60.0  # for the others to connect

READY, SUMMED = 0, 1
"""Phases: this rank's data can be read; this rank has read the others'."""


class PeerError(RuntimeError):
    """Another rank died, stopped answering, or called another collective."""


class Wires:
    """Sockets to all peers, and the book of who has reached which phase of which collective.

    Args:
        rank: Of this process.
        sockets: To each other rank, for tokens.
        controls: To each other rank, for file descriptors.
        timeout_s: Seconds to wait for a peer.
    """

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
        self._names.pop(self._began - _REMEMBERED, None)
        for peer, heard in self._heard.items():
            while heard and heard[0][0] <= self._began:
                self._compare(peer, *heard.popleft())
        return self._began

    def tell(self, phase: int, number: int) -> None:
        """Tell every peer that this rank has reached a phase."""
        kind, elements = self._names[number]
        token = _TOKEN.pack(phase, kind, 0, number, elements)
        for peer in self._sockets:
            try:
                self._send(peer, number, token)
            except (BrokenPipeError, ConnectionResetError):
                self._gone.add(peer)  # what it said before may explain why: see await_all

    def _send(self, peer: int, number: int, data: bytes) -> None:
        wire = self._sockets[peer]
        deadline = time.monotonic() + self._timeout_s
        while data:
            try:
                data = data[wire.send(data) :]
            except BlockingIOError:  # the peer is hundreds of tokens behind
                if time.monotonic() > deadline:
                    msg = f"{self._describe(number)}: rank {peer} takes no signals; it may hang"
                    raise PeerError(msg) from None
                select.select([], [wire], [], 0.01)
                self._listen(0)  # it may be waiting for room here, too

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
        self.tell(READY, number)
        self.await_all(READY, number)
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
        """Close all sockets, which tells the peers."""
        for wire in (*self._sockets.values(), *self._controls.values()):
            wire.close()


_OPEN: "weakref.WeakSet[Wires]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked data-loading worker must not keep a dead rank's sockets open."""
    for wires in list(_OPEN):
        wires.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_listener() -> tuple["socket.socket | None", str]:
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


def host_name() -> str:
    """Name the kernel and the network namespace, within which abstract sockets are seen."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return secrets.token_hex(8)  # unknown: unlike any other


def connect_all(
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
