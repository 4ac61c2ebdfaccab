"""Shipping of a run's log files to the server, as numbered lines, each exactly once.

The file ranges of a batch are saved before it is sent. If the agent dies while sending, the next
one builds the same batch from the same ranges, with the same numbers, and the server drops the
lines that it already has.
"""

import re
import time
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from zerolab.contract.messages import LogEntry
from zerolab.contract.run_folder import RunFolder
from zerolab.files import write_atomic

__all__ = ["LogShipper", "LogTarget"]

_FILE_BYTES = 256 * 1024
"""Maximum bytes of one file in a batch."""
_LINE_CHARS = 16_000
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_LEVEL_CHARS = 80
"""Characters of a line in which a level is recognized; later ones are words of the message."""
_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")


class LogTarget(Protocol):
    """Receiver of numbered log lines, such as :class:`zerolab.client.http.Client`."""

    def ship_logs(self, run_id: int, first: int, entries: list[LogEntry], node: int = 0) -> int:
        """Store the new entries; return the number of the next one."""


class _Range(msgspec.Struct):
    """Part of a file, in bytes."""

    name: str
    start: int
    stop: int


class _Cursor(msgspec.Struct):
    """Shipped bytes, and the batch in transit."""

    next: int = 0
    """Number of the next entry."""
    offsets: dict[str, int] = {}
    """Shipped bytes by file name."""
    pending: list[_Range] = []
    """File ranges of the batch in transit."""


class LogShipper:
    """Ships the logs of a run; a run may have only one shipper at a time.

    Args:
        folder: Directory of the run.
        run_id: Id of the run.
        target: Receiver of the lines.
        node: Node rank of this agent.
    """

    def __init__(self, folder: RunFolder, run_id: int, target: LogTarget, node: int = 0) -> None:
        self._node = node
        self._folder = folder
        self._run_id = run_id
        self._target = target
        self._cursor = _read_cursor(folder.shipped)

    def ship(self, *, final: bool = False) -> None:
        """Send all lines of the files.

        Args:
            final: The files are complete: include a last line without a line end.

        Raises:
            ZerolabError: If the server does not store it; the next call sends it again.
        """
        while True:
            if not self._cursor.pending:
                self._cursor.pending = self._collect(final=final)
                if not self._cursor.pending:
                    return
                # Saved before it is sent: an agent that dies here sends the same ranges again.
                self._save()
            self._send()

    def _collect(self, *, final: bool) -> list[_Range]:
        ranges = []
        for path in sorted(self._folder.logs.iterdir()):
            if path != self._folder.agent_log and not _RANK_FILE.fullmatch(path.name):
                continue
            start = self._cursor.offsets.get(path.name, 0)
            content = _read(path, start, _FILE_BYTES)
            complete = content.rfind(b"\n") + 1
            # A line longer than a batch is cut; else it would never be shipped.
            if final or (not complete and len(content) == _FILE_BYTES):
                complete = complete or len(content)
            if complete:
                ranges.append(_Range(path.name, start, start + complete))
        return ranges

    def _send(self) -> None:
        entries = [entry for part in self._cursor.pending for entry in self._entries(part)]
        stored = self._ship(entries)
        if stored < self._cursor.next + len(entries) and stored != self._cursor.next:
            # The server lost lines, or numbers differently: continue with its numbers.
            self._cursor.next = stored
            stored = self._ship(entries)
        self._cursor.next = stored
        for part in self._cursor.pending:
            self._cursor.offsets[part.name] = part.stop
        self._cursor.pending = []
        self._save()

    def _ship(self, entries: list[LogEntry]) -> int:
        return self._target.ship_logs(self._run_id, self._cursor.next, entries, self._node)

    def _entries(self, part: _Range) -> list[LogEntry]:
        content = _read(self._folder.logs / part.name, part.start, part.stop - part.start)
        match = _RANK_FILE.fullmatch(part.name)
        rank = int(match[1]) if match else None
        stream: Literal["stdout", "stderr", "agent"] = "agent"
        if match:
            stream = "stdout" if match[2] == "out" else "stderr"
        now = time.time()
        return [
            LogEntry(line, now, rank, stream, _level(line))
            for line in _lines(content.decode(errors="replace"))
        ]

    def _save(self) -> None:
        write_atomic(self._folder.shipped, msgspec.json.encode(self._cursor))


def _read_cursor(path: Path) -> _Cursor:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Cursor)
    except FileNotFoundError:
        return _Cursor()


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _lines(text: str) -> list[str]:
    r"""Split at line ends; a line that was redrawn with ``\r`` has its last state.

    Terminal codes (colors, cursor movements) are removed.
    """
    lines = text.removesuffix("\n").split("\n")
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return [_TERMINAL_CODE.sub("", line)[:_LINE_CHARS] for line in shown]


def _level(line: str) -> str | None:
    match = _LEVEL.search(line[:_LEVEL_CHARS])
    return match[1] if match else None
