"""Messages between the coordinator and a node's worker: one JSON object per line.

```
worker -> coordinator    Hello, then RankOutput and Beat as they occur, SpoolPiece for each file,
                         at last Ended
coordinator -> worker    Job, then Beat as they occur, or Stop
```

The channel is the standard input and output of the worker. Its end, or no heartbeat for
``Job.silence_s``, kills everything that the worker started.
"""

import msgspec

from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import Nodes, RunSpec

__all__ = [
    "BEAT_S",
    "SUSPENDED_S",
    "Beat",
    "Ended",
    "FromCoordinator",
    "FromWorker",
    "Hello",
    "Job",
    "RankOutput",
    "SpoolPiece",
    "Stop",
    "decode_from_coordinator",
    "decode_from_worker",
    "encode",
]

BEAT_S = 1.0
"""Seconds between heartbeats, in both directions."""
SUSPENDED_S = 3.0
"""A side whose own loop paused for this many seconds was suspended. It then does not count missing
heartbeats as silence of the other side."""


class Job(msgspec.Struct, frozen=True, tag="job"):
    """The job of a worker."""

    run: RunSpec
    """Run specification: the command of every rank and its directory, which all machines see. With
    ``archive`` the worker creates a directory and sets it."""
    environment: dict[str, str]
    """Variables in addition to the machine's."""
    nodes: Nodes | None
    """None if this is the only machine; then any free port is used."""
    slots: tuple[int, ...]
    """Slots of the machine for the ranks."""
    silence_s: float
    """Seconds without a heartbeat after which the coordinator is lost."""
    archive: bytes = b""
    """The model directory as tar.gz, for a run of an experiment."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Send SIGTERM to the ranks, and kill the remaining ones after the grace period."""

    grace_s: float


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a worker."""

    host: str
    version: str
    """Version of zerolab."""
    port: int = 0
    """A free port of the machine for the rendezvous."""
    connection: str = ""
    """``SSH_CONNECTION``: client's address and port, server's address and port."""


class RankOutput(msgspec.Struct, frozen=True, tag="said"):
    """A piece of a rank's output, not necessarily full lines; rank None is the launcher."""

    content: bytes
    rank: int | None = None
    stream: str = "out"
    """``out`` or ``err``."""


class SpoolPiece(msgspec.Struct, frozen=True, tag="left"):
    """A piece of a spool file with undelivered reports of an experiment's ranks."""

    name: str
    content: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Outcome of the worker's ranks; its last message."""

    outcome: Outcome


FromCoordinator = Job | Stop | Beat
FromWorker = Hello | RankOutput | Beat | SpoolPiece | Ended

_from_head = msgspec.json.Decoder(FromCoordinator)
_from_node = msgspec.json.Decoder(FromWorker)


def encode(message: FromCoordinator | FromWorker) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode_from_coordinator(line: bytes) -> FromCoordinator:
    """Decode a line from the coordinator.

    Raises:
        msgspec.DecodeError: If it is invalid.
    """
    message: FromCoordinator = _from_head.decode(line)
    return message


def decode_from_worker(line: bytes) -> FromWorker:
    """Decode a line from a worker.

    Raises:
        msgspec.DecodeError: If it is invalid; a login shell may write there too.
    """
    message: FromWorker = _from_node.decode(line)
    return message
