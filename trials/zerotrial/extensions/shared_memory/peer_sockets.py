"""Signals between ranks of one host: tokens on Unix sockets, and the phases peers have reached.

A token says that a rank has reached a phase of a collective. The kernel orders memory around it, a
waiting rank sleeps, and a rank that dies closes its sockets, which its peers notice at once. The
sockets have abstract names, without files.
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

from zerotrial.engine.comm.communicator import PeerError

__all__ = [
    "READY",
    "SUMMED",
    "PeerSockets",
    "connect_all",
    "host_name",
    "open_listener",
]

_TOKEN = struct.Struct("<BBHIQ")  # phase, collective, unused, sequence number, elements
_HELLO = struct.Struct("<II")  # rank, channel
_KINDS = ("fence", "sum", "reduce_scatter", "all_reduce", "all_gather", "broadcast", "allocate")
_REMEMBERED = 1 << 14  # number of collectives; more than can be in progress at a time
_CONNECT_TIMEOUT_S = 60.0

_Token = tuple[int, int, int]

READY, SUMMED = 0, 1
"""Phases: this rank's data can be read; this rank has read its peers' data."""


class PeerSockets:
    """Sockets to all peers, and the phase of each collective that each peer has reached.

    Args:
        rank: Rank of this process.
        sockets: Socket to each other rank, for tokens.
        controls: Socket to each other rank, for file descriptors.
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
        self._last_number = 0
        self._calls: dict[int, tuple[int, int]] = {}  # recent ones: number -> kind, elements
        # Number of the last collective in which a peer reached each phase. Tokens of a phase
        # arrive in the order of the collectives, so one number per phase is enough. If a
        # collective lacks a phase, the number of a later one covers it.
        self._reached = {peer: [0, 0] for peer in self._sockets}
        self._early_tokens: dict[int, deque[tuple[int, int, int]]] = {
            p: deque() for p in self._sockets
        }
        self._partial = dict.fromkeys(self._sockets, b"")
        self._closed: set[int] = set()
        self._poll = select.poll()
        for connection in self._sockets.values():
            connection.settimeout(0)
            self._poll.register(connection, select.POLLIN)
        _OPEN_SOCKETS.add(self)
        self._by_fd = {connection.fileno(): peer for peer, connection in self._sockets.items()}

    def begin(self, kind: str, elements: int) -> int:
        """Register the next collective; return its number."""
        self._last_number += 1
        self._calls[self._last_number] = (_KINDS.index(kind), elements)
        self._calls.pop(self._last_number - _REMEMBERED, None)
        for peer, heard in self._early_tokens.items():
            while heard and heard[0][0] <= self._last_number:
                self._compare(peer, *heard.popleft())
        return self._last_number

    def signal_all(self, phase: int, number: int) -> None:
        """Signal every peer that this rank has reached a phase."""
        kind, elements = self._calls[number]
        token = _TOKEN.pack(phase, kind, 0, number, elements)
        for peer in self._sockets:
            try:
                self._send(peer, number, token)
            except (BrokenPipeError, ConnectionResetError):
                self._closed.add(peer)  # earlier tokens may explain why, see wait_for_all

    def _send(self, peer: int, number: int, data: bytes) -> None:
        connection = self._sockets[peer]
        deadline = time.monotonic() + self._timeout_s
        while data:
            try:
                data = data[connection.send(data) :]
            except BlockingIOError:  # the peer is hundreds of tokens behind
                if time.monotonic() > deadline:
                    msg = f"{self._describe(number)}: rank {peer} takes no signals; it may hang"
                    raise PeerError(msg) from None
                select.select([], [connection], [], 0.01)
                self._receive(0)  # the peer's buffer may be full because ours is: drain it

    def have_all_reached(self, phase: int, number: int) -> bool:
        """Return whether every peer has reached a phase, without waiting."""
        if self._peers_behind(phase, number):
            self._receive(0)
            return not self._peers_behind(phase, number)
        return True

    def wait_for_all(self, phase: int, number: int) -> None:
        """Wait until every peer has reached a phase.

        Raises:
            PeerError: If a peer died, or did not reach it within the timeout.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._peers_behind(phase, number):
            self._receive(0)
            missing = self._peers_behind(phase, number)
            for peer in missing:
                if peer in self._closed:
                    raise self._peer_closed_error(peer, number)
            remaining = deadline - time.monotonic()
            if missing and remaining <= 0:
                names = ", ".join(str(peer) for peer in missing)
                msg = (
                    f"{self._describe(number)}: rank {names} has not called it within "
                    f"{self._timeout_s:g} s; this is rank {self._rank}"
                )
                raise PeerError(msg)
            if missing:
                self._receive(remaining)

    def _peers_behind(self, phase: int, number: int) -> list[int]:
        return [peer for peer, phases in self._reached.items() if phases[phase] < number]

    def _receive(self, wait_s: float) -> None:
        for fd, _ in self._poll.poll(wait_s * 1000):
            peer = self._by_fd[fd]
            try:
                data = self._sockets[peer].recv(1 << 14)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                self._closed.add(peer)
                self._poll.unregister(fd)
                continue
            self._read_tokens(peer, self._partial[peer] + data)

    def _read_tokens(self, peer: int, data: bytes) -> None:
        complete = len(data) - len(data) % _TOKEN.size
        for phase, kind, _, number, elements in _TOKEN.iter_unpack(data[:complete]):
            self._reached[peer][phase] = number
            if number <= self._last_number:
                self._compare(peer, number, kind, elements)
            else:
                self._early_tokens[peer].append((number, kind, elements))
        self._partial[peer] = data[complete:]

    def _compare(self, peer: int, number: int, kind: int, elements: int) -> None:
        local = self._calls.get(number)
        if local is not None and local != (kind, elements):
            msg = (
                f"{self._describe(number)}: rank {peer} called {_KINDS[kind]} of {elements} "
                "elements instead; all ranks must make the same engine calls in the same order"
            )
            raise PeerError(msg)

    def _describe(self, number: int) -> str:
        kind, elements = self._calls[number]
        return f"collective {number}, {_KINDS[kind]} of {elements} elements"

    def _peer_closed_error(self, peer: int, number: int) -> PeerError:
        return PeerError(
            f"rank {peer} has exited or closed its engine; see its log lines for the cause "
            f"(this is rank {self._rank} in {self._describe(number)})"
        )

    def exchange_descriptors(self, fd: int, nbytes: int) -> dict[int, int]:
        """Send a file descriptor to every peer; return theirs."""
        number = self.begin("allocate", nbytes)
        self.signal_all(READY, number)
        self.wait_for_all(READY, number)
        for control in self._controls.values():
            socket.send_fds(control, [b"f"], [fd])
        received: dict[int, int] = {}
        for peer, control in self._controls.items():
            control.settimeout(self._timeout_s)
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                raise self._peer_closed_error(peer, number)
            received[peer] = descriptors[0]
        return received

    def close(self) -> None:
        """Close all sockets, which peers notice."""
        for connection in (*self._sockets.values(), *self._controls.values()):
            connection.close()


_OPEN_SOCKETS: "weakref.WeakSet[PeerSockets]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked data worker, which would keep a dead rank's sockets open."""
    for peer_sockets in list(_OPEN_SOCKETS):
        peer_sockets.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_listener() -> tuple["socket.socket | None", str]:
    """Open a socket under an abstract name, which only the group learns."""
    if sys.platform != "linux" or not Path("/proc/self/fd").is_dir():
        return None, ""
    name = f"\0zerolab-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("zerolab"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(64)
        listener.settimeout(_CONNECT_TIMEOUT_S)
    except OSError:
        return None, ""
    return listener, name


def host_name() -> str:
    """Return kernel and network namespace, the scope of abstract sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return secrets.token_hex(8)  # unknown: different from every other rank's


def connect_all(
    rank: int,
    names: Sequence[str],
    listener: socket.socket,
    channels: Sequence[dict[int, socket.socket]],
) -> None:
    """Connect every channel to all lower ranks, then accept all higher ranks."""
    for peer in range(rank):
        for channel, sockets in enumerate(channels):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer] = connection
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(names[peer])
            connection.sendall(_HELLO.pack(rank, channel))
    for _ in range((len(names) - 1 - rank) * len(channels)):
        connection, _address = listener.accept()
        connection.settimeout(_CONNECT_TIMEOUT_S)
        peer, channel = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
        channels[channel][peer] = connection
