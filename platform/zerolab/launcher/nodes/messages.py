"""What a head and the launcher of a node tell each other: one JSON object a line.

```
node -> head    Hello, then Said and Beat as they come, Left for each file, last Ended
head -> node    Job, then Beat as they come, or Stop
```

The channel is the standard input and output of the node's process. Its end, or silence for longer
than ``Job.silence_s``, kills all that the node has started.
"""

import msgspec

from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import Nodes, RunSpec

__all__ = [
    "BEAT_S",
    "HELD_UP_S",
    "Beat",
    "Ended",
    "FromHead",
    "FromNode",
    "Hello",
    "Job",
    "Left",
    "Said",
    "Stop",
    "decode_from_head",
    "decode_from_node",
    "encode",
]

BEAT_S = 1.0
"""Seconds between two signs of life, in both directions."""


HELD_UP_S = 3.0
"""A side that has slept for so long itself was held up, as by a machine that was suspended: what it
has not heard meanwhile was no silence of the other."""


class Job(msgspec.Struct, frozen=True, tag="job"):
    """What a node shall run."""

    run: RunSpec
    """What every rank runs, and in which directory: one that all machines see, or, with
    ``archive``, none yet. The node puts in where it is itself."""
    environment: dict[str, str]
    """Variables on top of the node's own."""
    nodes: Nodes | None
    """None where this is the only machine, and any free port will do."""
    slots: tuple[int, ...]
    """Which of its slots the ranks take."""
    silence_s: float
    """After so many seconds without a sign of life the head is taken for gone."""
    archive: bytes = b""
    """The model directory as tar.gz, for a run of an experiment."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Send SIGTERM to the ranks, and kill what is left of them later."""

    grace_s: float


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The node's process is there."""

    host: str
    version: str
    """Of zerolab."""
    port: int = 0
    """One that is free there, for the ranks to meet on."""
    connection: str = ""
    """``SSH_CONNECTION``: client's address and port, server's address and port."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A piece of what a rank wrote, in lines or not; rank None is the launcher."""

    content: bytes
    rank: int | None = None
    stream: str = "out"
    """``out`` or ``err``."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A piece of a file that the ranks of an experiment have left in their spool."""

    name: str
    content: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """How the ranks of the node ended; nothing comes after this."""

    outcome: Outcome


FromHead = Job | Stop | Beat
FromNode = Hello | Said | Beat | Left | Ended

_from_head = msgspec.json.Decoder(FromHead)
_from_node = msgspec.json.Decoder(FromNode)


def encode(message: FromHead | FromNode) -> bytes:
    """Make a line of a message."""
    return msgspec.json.encode(message) + b"\n"


def decode_from_head(line: bytes) -> FromHead:
    """Read a line that the head has sent.

    Raises:
        msgspec.DecodeError: If it is none.
    """
    message: FromHead = _from_head.decode(line)
    return message


def decode_from_node(line: bytes) -> FromNode:
    """Read a line that a node has sent.

    Raises:
        msgspec.DecodeError: If it is none; a login shell may write there too.
    """
    message: FromNode = _from_node.decode(line)
    return message
