"""Records on disk between a report and the server: append-only, numbered, bounded.

A spool is a directory of segments. A segment is named by the number of its first record and holds
frames, one after the other: length of the payload, its CRC-32 combined by XOR with the record's
number (4 bytes each, little-endian), then the payload. A frame is one ``write`` into the page
cache, so once it has returned the record survives the death of the process. The tail that a death
tears off in mid-write is recognised by its length, and dropped.

A damaged frame costs what it holds: the next whole one says its own number, and what lies between
is given to the reader as empty payloads, so that the numbers go on without a gap.
"""

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

__all__ = ["AppendFile", "Spool", "SpoolReader"]

_HEADER = struct.Struct("<II")
_MASK = 2**32 - 1
_UNNUMBERED = 0
"""What the XOR leaves of a frame by version 0.1, which did not add the number."""
_SUFFIX = ".spool"
_SCAN_BYTES = 1024 * 1024
_LEAST_FRAME = _HEADER.size + 1
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
        if self._dirty:  # now: a reader must not see a torn tail beside what is written next
            self._cut()

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing.

        Raises:
            OSError: If there is no room, or the file cannot be written.
        """
        if self._dirty:
            self._cut()
        self._dirty = True
        written = os.write(self._fd, data)
        if written == len(data):
            self.size += written
            self._dirty = False
            return
        # No room for the rest: the next append cuts this part off first.
        msg = f"only {written} of {len(data)} bytes could be written"
        raise OSError(msg)

    def _cut(self) -> None:
        os.ftruncate(self._fd, self.size)
        self._dirty = False

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
        self.count, size = _measure(last)
        """Number of the newest record; 0 when there is none."""
        self._file = AppendFile(last.path, size)

    def append(self, payload: bytes) -> None:
        """Write one record; once this returns, only the loss of the machine can lose it.

        Raises:
            OSError: If there is no room for it.
        """
        if self._file.size >= self._segment_bytes:
            self._next_segment()
        number = self.count + 1
        checksum = crc32(payload) ^ (number & _MASK)
        self._file.append(_HEADER.pack(len(payload), checksum) + payload)
        self.count = number

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

    Args:
        directory: Of the spool.
        ended: Nobody writes any more: a damaged last record is lost, not on its way.
    """

    def __init__(self, directory: Path, *, ended: bool = False) -> None:
        self.directory = directory
        self._ended = ended
        self._next = 1
        self._sought = False
        self._segment: _Segment | None = None
        self._offset = 0
        self._number = 1  # of the record at _offset
        self._searched = (0, 0)  # offset and size of a segment in which no whole frame followed

    def seek(self, number: int) -> None:
        """Go on with record ``number``; what is not there any more comes as empty payloads."""
        self._next, self._sought = number, True
        if number < self._number:
            self._segment = None

    def read(self, max_bytes: int) -> tuple[int, list[bytes]]:
        """Return the records that come next, and go on behind them.

        Args:
            max_bytes: About how much to read; at least one record is read whole.

        Returns:
            Number of the first record and the payloads, empty ones for records that are lost;
            no payloads at the end of the spool.
        """
        while True:
            segments = _segments(self.directory)
            if self._segment is None and not self._locate(segments):
                return self._next, []
            assert self._segment is not None
            # Looked up before the read: a segment that has a successor does not grow any more.
            behind = [segment for segment in segments if segment.first > self._segment.first]
            payloads, consumed = _read_frames(
                self._segment.path, self._offset, self._number, max_bytes
            )
            self._offset += consumed
            if not payloads:
                lost = self._pass_damage(behind[0] if behind else None)
                if lost is None:
                    return self._next, []
                payloads = [b""] * lost
            first, self._number = self._number, self._number + len(payloads)
            wanted = payloads[max(0, self._next - first) :]
            if wanted:
                self._next = self._number
                return self._next - len(wanted), wanted

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
        if self._next < self._number and self._sought:  # asked for, and gone: pass over it
            self._segment, self._number = _Segment(self._next, self._segment.path), self._next
            self._offset = _size(self._segment.path)
        self._next = max(self._next, self._number)
        return True

    def _pass_damage(self, following: "_Segment | None") -> int | None:
        """Go behind what cannot be read; return how many records it held, None at the end."""
        assert self._segment is not None
        path, size = self._segment.path, _size(self._segment.path)
        if self._searched != (self._offset, size):
            found = _next_whole(path, self._offset, self._number)
            if found is not None:
                self._offset, number = found
                return number - self._number
            self._searched = (self._offset, size)
        if following is not None:
            self._segment, self._offset = following, 0
            self._number = min(self._number, following.first)
            return following.first - self._number
        if self._ended and _is_damaged(path, self._offset, self._number):
            self._offset = size
            return 1
        return None


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


def _read_frames(path: Path, offset: int, number: int, max_bytes: int) -> tuple[list[bytes], int]:
    """Read whole frames from ``offset`` on, the first of which holds record ``number``.

    Returns:
        Their payloads, and how many bytes they take.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(max(max_bytes, _HEADER.size))
            if len(data) >= _HEADER.size:
                missing = _HEADER.size + _HEADER.unpack_from(data)[0] - len(data)
                data += file.read(min(missing, _size(path))) if missing > 0 else b""
    except FileNotFoundError:
        return [], 0
    payloads, position = [], 0
    while position + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        payload = data[start : start + length]
        if not length or len(payload) != length:
            break
        found = crc32(payload) ^ checksum
        if found != number & _MASK and found != _UNNUMBERED:
            break
        payloads.append(payload)
        number += 1
        position = start + length
    return payloads, position


def _next_whole(path: Path, offset: int, number: int) -> tuple[int, int] | None:
    """Find the first whole frame from ``offset`` on; return its offset and its number."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = memoryview(file.read())
    except FileNotFoundError:
        return None
    for position in range(len(data) - _HEADER.size):
        length, checksum = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        if not 0 < length <= len(data) - start:
            continue
        found = crc32(data[start : start + length]) ^ checksum
        if found == _UNNUMBERED:
            return offset + position, number + (position > 0)
        passed = (found - number) & _MASK
        if passed <= position // _LEAST_FRAME:
            return offset + position, number + passed
    return None


def _is_damaged(path: Path, offset: int, number: int) -> bool:
    """Whether a last frame that is not whole has its full length: then no death tore it."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return False
    if len(data) < _LEAST_FRAME:
        return False
    length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]  # it is whole, and the length is damaged, or:
    return bool(crc32(payload) ^ checksum == number & _MASK or 0 < length <= len(payload))


def _measure(segment: _Segment) -> tuple[int, int]:
    """Return the number of a segment's last record, and where it ends in bytes."""
    number, offset = segment.first, 0
    while True:
        payloads, consumed = _read_frames(segment.path, offset, number, _SCAN_BYTES)
        if payloads:
            number += len(payloads)
            offset += consumed
            continue
        found = _next_whole(segment.path, offset, number)
        if found is not None:
            offset, number = found
        elif _is_damaged(segment.path, offset, number):
            return number, _size(segment.path)  # keeps its number: the server may have it
        else:
            return number - 1, offset
