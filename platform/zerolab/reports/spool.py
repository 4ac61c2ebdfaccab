"""Records on disk between a report and the server: append-only, numbered, bounded.

A spool is a directory of segments. A segment is named by the number of its first record and holds
frames, one after the other: length and CRC-32 of the payload (4 bytes each, little-endian), then
the payload. A frame is one ``write`` into the page cache, so once it has returned the record
survives the death of the process. The tail that a death tears off in mid-write is recognised by
its length or its checksum, and dropped.
"""

import logging
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

__all__ = ["AppendFile", "Spool", "SpoolReader"]

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_SUFFIX = ".spool"
_SCAN_BYTES = 1024 * 1024
SEGMENT_BYTES = 16 * 1024 * 1024
MAX_BYTES = 1024 * 1024 * 1024


class AppendFile:
    """A file that only grows, by whole writes.

    Args:
        path: Created if missing, readable by its owner alone.
        size: Where the valid content ends; what lies behind is cut off.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._dirty = os.fstat(self._fd).st_size != size

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing.

        Raises:
            OSError: If there is no room, or the file cannot be written.
        """
        if self._dirty:
            os.ftruncate(self._fd, self.size)
            self._dirty = False
        self._dirty = True
        written = os.write(self._fd, data)
        if written == len(data):
            self.size += written
            self._dirty = False
            return
        # No room for the rest: the next append cuts this part off first.
        msg = f"only {written} of {len(data)} bytes could be written"
        raise OSError(msg)

    def close(self) -> None:
        """Close the file; what was appended stays."""
        os.close(self._fd)


class Spool:
    """The writing end; one at a time for a directory.

    Args:
        directory: Created if missing. Records that it holds already keep their numbers.
        segment_bytes: A segment that has grown beyond this is followed by a new one.
        max_bytes: Most that all segments may hold that have not been given back by
            :meth:`SpoolReader.discard`.
    """

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        segments = _segments(directory)
        last = segments[-1] if segments else _Segment(1, directory / _name(1))
        frames, size = _measure(last.path)
        self.count = last.first + frames - 1
        """Number of the newest record; 0 when there is none."""
        self._file = AppendFile(last.path, size)

    def append(self, payload: bytes) -> None:
        """Write one record; once this returns, only the loss of the machine can lose it.

        Raises:
            OSError: If there is no room for it.
        """
        if self._file.size >= self._segment_bytes:
            self._next_segment()
        self._file.append(_HEADER.pack(len(payload), crc32(payload)) + payload)
        self.count += 1

    def close(self) -> None:
        """Close the newest segment; the records stay for a reader."""
        self._file.close()

    def _next_segment(self) -> None:
        held = sum(_size(segment.path) for segment in _segments(self.directory))
        if held >= self._max_bytes:
            msg = f"{self.directory} holds {held} bytes that no server has taken yet"
            raise OSError(msg)
        first = self.count + 1
        following = AppendFile(self.directory / _name(first), 0)
        self._file.close()
        self._file = following


class SpoolReader:
    """The reading end: goes through the records in order, from any number.

    It may run beside a writer, and sees each record once its write is complete.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._next = 1
        self._segment: _Segment | None = None
        self._offset = 0
        self._number = 1  # of the record at _offset

    def seek(self, number: int) -> None:
        """Go on with record ``number``, or with the oldest one that is still there."""
        self._next = number
        if number < self._number:
            self._segment = None

    def read(self, max_bytes: int) -> tuple[int, list[bytes]]:
        """Return the records that come next, and go on behind them.

        Args:
            max_bytes: About how much to read; at least one record is read whole.

        Returns:
            Number of the first record and the payloads; no payloads at the end of the spool.
        """
        while True:
            segments = _segments(self.directory)
            if self._segment is None and not self._locate(segments):
                return self._next, []
            assert self._segment is not None
            # Looked up before the read: a segment that has a successor does not grow any more.
            behind = [segment for segment in segments if segment.first > self._segment.first]
            payloads, consumed = _read_frames(self._segment.path, self._offset, max_bytes)
            if payloads:
                first, self._number = self._number, self._number + len(payloads)
                self._offset += consumed
                wanted = payloads[max(0, self._next - first) :]
                if wanted:
                    self._next = self._number
                    return self._next - len(wanted), wanted
            elif behind:
                self._enter(behind[0])
            else:
                return self._next, []

    def discard(self, through: int) -> None:
        """Delete the segments whose records all have numbers up to ``through``."""
        segments = _segments(self.directory)
        for segment, following in pairwise(segments):
            if following.first <= through + 1:
                segment.path.unlink(missing_ok=True)

    def _locate(self, segments: "list[_Segment]") -> bool:
        """Open the segment that holds the next record, or the oldest one."""
        if not segments:
            return False
        earlier = [segment for segment in segments if segment.first <= self._next]
        self._segment = (earlier or segments)[-1 if earlier else 0]
        self._offset, self._number = 0, self._segment.first
        self._next = max(self._next, self._number)
        return True

    def _enter(self, segment: "_Segment") -> None:
        wanted = max(self._number, self._next)
        if segment.first > wanted:
            logger.error(
                "%s is damaged: records %d to %d are lost",
                segment.path.parent, wanted, segment.first - 1,
            )  # fmt: skip
        self._segment, self._offset, self._number = segment, 0, segment.first
        self._next = max(self._next, segment.first)


class _Segment(NamedTuple):
    first: int
    path: Path


def _name(first: int) -> str:
    return f"{first:020d}{_SUFFIX}"


def _segments(directory: Path) -> list[_Segment]:
    """List the segments, oldest first."""
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == _SUFFIX)
    except FileNotFoundError:
        return []
    return [_Segment(int(name.removesuffix(_SUFFIX)), directory / name) for name in names]


def _size(path: Path) -> int:
    """Return a file's size in bytes; 0 when the reader has just deleted it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_frames(path: Path, offset: int, max_bytes: int) -> tuple[list[bytes], int]:
    """Read whole frames from ``offset`` on; return their payloads and how many bytes they take."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(max(max_bytes, _HEADER.size))
            if len(data) >= _HEADER.size:
                missing = _HEADER.size + _HEADER.unpack_from(data)[0] - len(data)
                data += file.read(missing) if missing > 0 else b""
    except FileNotFoundError:
        return [], 0
    payloads, position = [], 0
    while position + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        payload = data[start : start + length]
        if not length or len(payload) != length or crc32(payload) != checksum:
            break
        payloads.append(payload)
        position = start + length
    return payloads, position


def _measure(path: Path) -> tuple[int, int]:
    """Count a segment's whole frames and their bytes."""
    frames = size = 0
    while True:
        payloads, consumed = _read_frames(path, size, _SCAN_BYTES)
        if not payloads:
            return frames, size
        frames += len(payloads)
        size += consumed
