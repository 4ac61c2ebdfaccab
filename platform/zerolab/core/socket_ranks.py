"""Collectives of small values between the ranks of a run, without torch.

Every rank has one authenticated connection to the chief (rank 0). Values travel as MessagePack:
None, booleans, numbers, strings, bytes, lists and dictionaries. Nothing is unpickled, so a peer
cannot run code. Send tensors with ``torch.distributed``.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import msgspec

from zerolab.errors import ConfigError, ZerolabError
from zerolab.ranks import RankLocation, Ranks

__all__ = ["SocketRanks"]

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_HELLO = struct.Struct("<32sI")
_CONFIRM = b"\x01"
_PORTS_TRIED = 16
_FIRST_HANDSHAKE_TIMEOUT_S = 0.5
_HANDSHAKE_TIMEOUT_S = 10.0
_RETRY_S = 0.05


class SocketRanks(RankLocation, Ranks):
    """Collectives of the ranks of a run over sockets: ``context.distributed``.

    Every rank must call a collective, in the same order, from one thread. If a rank dies or does
    not answer in time, the other ranks get an error that names it.

    Args:
        rank: 0 is the chief.
        size: Number of ranks.
        local_rank: Rank among those of this machine.
        local_size: Number of ranks on this machine.
        address: Host of the chief; unused on one machine.
        port: The chief listens on one of the ports that follow this one.
        secret: Known to the ranks only.
        timeout_s: Longest wait for the other ranks, in seconds.

    Raises:
        ZerolabError: If the ranks do not find each other in time.

    Example:
        >>> with zerolab.core.init() as context:
        ...     context.distributed.allgather({"loss": 0.5})
        [{'loss': 0.5}]
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        secret: str = "",
        timeout_s: float = 1800.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.timeout_s = timeout_s
        """Longest wait for the other ranks in a collective, in seconds."""
        self._peers: dict[int, socket.socket] = {}
        if size == 1:
            return
        one_machine = local_size == size
        ports = [1024 + (port + offset - 1024) % 64512 for offset in range(1, _PORTS_TRIED + 1)]
        key = hashlib.sha256(f"zerolab {secret} {port} {size}".encode()).digest()
        deadline = time.monotonic() + timeout_s
        if rank == 0:
            host = "127.0.0.1" if one_machine else ""
            self._peers = _accept_ranks(host, ports, key, size, deadline)
        else:
            host = "127.0.0.1" if one_machine else address
            self._peers = {0: _find_chief(host, ports, key, rank, deadline)}

    @classmethod
    def from_environment(
        cls,
        secret: str = "",
        *,
        timeout_s: float = 1800.0,
        environment: Mapping[str, str] = os.environ,
    ) -> Self:
        """Read torchrun's variables; without them, this process is the only rank.

        Args:
            secret: Known to the ranks only.
            timeout_s: Longest wait for the other ranks, in seconds.
            environment: Environment variables; those of the process by default.

        Returns:
            The connected ranks.

        Raises:
            ConfigError: If only some of the variables are there, or one is not a number.
            ZerolabError: If the ranks do not find each other in time.

        Example:
            >>> from zerolab.core.socket_ranks import SocketRanks
            >>> SocketRanks.from_environment(environment={}).size
            1
        """
        if "WORLD_SIZE" not in environment:
            return cls(timeout_s=timeout_s)
        numbers, problems = {}, []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            text = environment.get(name, "")
            if text.isdecimal():
                numbers[name] = int(text)
            else:
                problems.append(f"{name}: must be a number, got {text!r}; start with torchrun")
        if problems:
            raise ConfigError("environment of the ranks", problems)
        return cls(
            numbers["RANK"],
            numbers["WORLD_SIZE"],
            numbers["LOCAL_RANK"],
            numbers["LOCAL_WORLD_SIZE"],
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=numbers["MASTER_PORT"],
            # A restarted group must not connect to remaining ranks of the previous one.
            secret=f"{secret} {environment.get('TORCHELASTIC_RUN_ID', '')} "
            f"{environment.get('TORCHELASTIC_RESTART_COUNT', '')}",
            timeout_s=timeout_s,
        )

    def allgather(self, value: Any, operation: str = "allgather") -> list[Any]:
        """Return every rank's value, in the order of ranks. **Collective**.

        Args:
            value: None, booleans, numbers, text, bytes, and lists and dicts of them.
            operation: Name of the exchange, for errors.

        Returns:
            One value per rank; tuples become lists.

        Raises:
            ConfigError: If MessagePack cannot hold ``value``.
            ZerolabError: If a rank dies, or does not take part in time.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.distributed.allgather(0.5)
            [0.5]
        """
        data = _encode(value)
        if self.size == 1:
            return [msgspec.msgpack.decode(data)]
        if self.rank == 0:
            parts = [data, *(self._receive(rank, operation) for rank in range(1, self.size))]
            gathered = msgspec.msgpack.encode([msgspec.Raw(part) for part in parts])
            for rank in self._peers:
                self._send(rank, gathered, operation)
        else:
            self._send(0, data, operation)
            gathered = self._receive(0, operation)
        values: list[Any] = msgspec.msgpack.decode(gathered)
        return values

    def broadcast(self, value: T, operation: str = "broadcast") -> T:
        """Return the chief's value on every rank. **Collective**.

        Args:
            value: Value of the chief, of the types of :meth:`allgather`; ignored on other ranks.
            operation: Name of the exchange, for errors.

        Returns:
            The chief's value.

        Raises:
            ConfigError: If MessagePack cannot hold ``value``.
            ZerolabError: If a rank dies, or does not take part in time.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.distributed.broadcast("run-7")
            'run-7'
        """
        if self.rank == 0:
            data = _encode(value)
            for rank in self._peers:
                self._send(rank, data, operation)
        else:
            data = self._receive(0, operation)
        received: T = msgspec.msgpack.decode(data)
        return received

    def close(self) -> None:
        """Close the connections; no collective may follow.

        Example:
            >>> from zerolab.core.socket_ranks import SocketRanks
            >>> SocketRanks().close()
        """
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, rank: int, data: bytes, operation: str) -> None:
        with self._peer(rank, operation) as peer:
            peer.sendall(_LENGTH.pack(len(data)) + data)

    def _receive(self, rank: int, operation: str) -> bytes:
        with self._peer(rank, operation) as peer:
            (length,) = _LENGTH.unpack(_receive_exactly(peer, _LENGTH.size))
            return _receive_exactly(peer, length)

    @contextmanager
    def _peer(self, rank: int, operation: str) -> Iterator[socket.socket]:
        """Yield the connection to a rank; name the rank in errors of the block."""
        try:
            peer = self._peers[rank]
            peer.settimeout(self.timeout_s)
            yield peer
        except TimeoutError:
            msg = (
                f"{operation}: rank {rank} did not take part within {self.timeout_s:g} s "
                f"(this is rank {self.rank}); do all ranks make the same calls?"
            )
            raise ZerolabError(msg) from None
        except (OSError, EOFError, KeyError) as error:
            msg = f"{operation}: rank {rank} has exited (this is rank {self.rank}); see its log"
            raise ZerolabError(msg) from error


def _accept_ranks(
    host: str, ports: Sequence[int], key: bytes, size: int, deadline: float
) -> dict[int, socket.socket]:
    """Wait, as the chief, for every other rank.

    torchrun names one port, which its own store uses. The chief listens on the first free port of
    the following ones; the other ranks try them in turn, and identify it by its proof of the key.
    """
    peers: dict[int, socket.socket] = {}
    with _listen(host, ports, size) as listener:
        while len(peers) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(peers))
                msg = f"ranks {missing} did not connect in time; see their logs"
                raise ZerolabError(msg) from None
            rank = _authenticate(peer, key, size)
            if rank is None:
                peer.close()
            else:
                peers[rank] = peer
    return dict(sorted(peers.items()))


def _authenticate(peer: socket.socket, key: bytes, size: int) -> int | None:
    _prepare(peer, _HANDSHAKE_TIMEOUT_S)
    with suppress(OSError, EOFError):
        proof, rank = _HELLO.unpack(_receive_exactly(peer, _HELLO.size))
        if 0 < rank < size and hmac.compare_digest(proof, _proof(key, "r", rank)):
            peer.sendall(_proof(key, "c", rank))
            # A rank that timed out connects again: count it only once it confirms.
            if _receive_exactly(peer, 1) == _CONFIRM:
                return int(rank)
    return None


def _find_chief(
    host: str, ports: Sequence[int], key: bytes, rank: int, deadline: float
) -> socket.socket:
    """Connect to the chief: try the ports until one proves that it has the key."""
    timeout_s = _FIRST_HANDSHAKE_TIMEOUT_S  # another service may listen there and never answer
    while time.monotonic() < deadline:
        for port in ports:
            try:
                peer = socket.create_connection((host, port), timeout_s)
            except OSError:
                continue
            if _introduce(peer, key, rank, timeout_s):
                return peer
            peer.close()
        timeout_s = min(_HANDSHAKE_TIMEOUT_S, 2 * timeout_s)
        time.sleep(_RETRY_S)
    msg = f"rank {rank} did not find the chief at {host} in time; see the chief's log"
    raise ZerolabError(msg)


def _introduce(peer: socket.socket, key: bytes, rank: int, timeout_s: float) -> bool:
    _prepare(peer, timeout_s)
    with suppress(OSError, EOFError):
        peer.sendall(_HELLO.pack(_proof(key, "r", rank), rank))
        if hmac.compare_digest(_receive_exactly(peer, 32), _proof(key, "c", rank)):
            peer.sendall(_CONFIRM)
            return True
    return False


def _proof(key: bytes, side: str, rank: int) -> bytes:
    return hmac.digest(key, f"{side}{rank}".encode(), "sha256")


def _listen(host: str, ports: Sequence[int], backlog: int) -> socket.socket:
    problems = []
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=backlog)
        except OSError as error:
            problems.append(f"port {port}: {error}")
    raise ConfigError("ports of the ranks", problems)


def _prepare(peer: socket.socket, timeout_s: float) -> None:
    peer.settimeout(timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        problem = f"must be made of numbers, strings, bytes, lists and dictionaries: {error}"
        raise ConfigError("value for the other ranks", [problem]) from error


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
