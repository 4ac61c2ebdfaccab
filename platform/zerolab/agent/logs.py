"""Lines of a run's log files, numbered, to the server, each exactly once.

Before a batch is sent, the file ranges that it is made of are written down. So the batch that an
agent was sending as it died is made again from the same ranges by the next one, with the same
numbers, and the server drops what it has already.
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
"""Most that one batch takes from one file."""
_LINE_CHARS = 16_000
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_LEVEL_CHARS = 80
"""A level stands at the head of a line, or it is a word of the message."""
_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")


class LogTarget(Protocol):
    """Takes numbered log lines; :class:`zerolab.client.http.Client` does."""

    def ship_logs(self, run_id: int, first: int, entries: list[LogEntry], node: int = 0) -> int:
        """Store what is new of ``entries``; return the number of the next one wanted."""


class _Range(msgspec.Struct):
    """Part of a file, in bytes."""

    name: str
    start: int
    stop: int


class _Cursor(msgspec.Struct):
    """What the server has, and what is on its way."""

    next: int = 0
    """Number of the next entry."""
    offsets: dict[str, int] = {}
    """File name to the bytes of it that are shipped."""
    pending: list[_Range] = []
    """What the batch on its way is made of."""


class LogShipper:
    """Ships one run's logs; only one at a time may exist for a run.

    Args:
        folder: Of the run.
        run_id: Of the run.
        target: Where to.
        node: Node rank of this agent.
    """

    def __init__(self, folder: RunFolder, run_id: int, target: LogTarget, node: int = 0) -> None:
        self._node = node
        self._folder = folder
        self._run_id = run_id
        self._target = target
        self._cursor = _read_cursor(folder.shipped)

    def ship(self, *, final: bool = False) -> None:
        """Send everything that stands in the files.

        Args:
            final: Nothing is written any more: a last line without its end counts too.

        Raises:
            ZerolabError: If the server does not take it; the next call sends it again.
        """
        while True:
            if not self._cursor.pending:
                self._cursor.pending = self._collect(final=final)
                if not self._cursor.pending:
                    return
                self._save()
            self._send()

    def _collect(self, *, final: bool) -> list[_Range]:
        ranges = []
        for path in sorted(self._folder.logs.iterdir()):
            if path != self._folder.agent_log and not _RANK_FILE.fullmatch(path.name):
                continue
            start = self._cursor.offsets.get(path.name, 0)
            content = _read(path, start, _FILE_BYTES)
            whole = content.rfind(b"\n") + 1
            if final or (not whole and len(content) == _FILE_BYTES):
                whole = whole or len(content)
            if whole:
                ranges.append(_Range(path.name, start, start + whole))
        return ranges

    def _send(self) -> None:
        entries = [entry for part in self._cursor.pending for entry in self._entries(part)]
        stored = self._ship(entries)
        if stored < self._cursor.next + len(entries) and stored != self._cursor.next:
            # The server has lost lines, or another numbering: go on with its own.
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
        found = _RANK_FILE.fullmatch(part.name)
        rank = int(found[1]) if found else None
        stream: Literal["stdout", "stderr", "agent"] = "agent"
        if found:
            stream = "stdout" if found[2] == "out" else "stderr"
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
    r"""Split at line ends; of a line that was redrawn with ``\r``, the last state counts.

    Codes for a terminal (colours, movements) are left out: a reader of logs has another one.
    """
    lines = text.removesuffix("\n").split("\n")
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return [_TERMINAL_CODE.sub("", line)[:_LINE_CHARS] for line in shown]


def _level(line: str) -> str | None:
    found = _LEVEL.search(line[:_LEVEL_CHARS])
    return found[1] if found else None
