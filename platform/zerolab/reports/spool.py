"""Spool: append-only, numbered and bounded storage of records before their upload.

A spool is a directory of segments. A segment is named by the number of its first record and holds
consecutive frames: length of the payload, its CRC-32 combined by XOR with the record's number (4
bytes each, little-endian), then the payload. A frame is one ``write`` into the page cache, so the
record survives the death of the process once it has returned. A torn frame at the end, from a death
during the write, is recognised by its length and dropped.

A damaged frame loses only its own records. The next valid frame has its own number, and the reader
returns empty payloads for the missing records, so that the numbers have no gap.
"""

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

__all__ = ["SPOOL_DIR", "AppendFile", "Spool", "SpoolReader"]

SPOOL_DIR = "spool"
"""Directory of the spool in a run's directory."""

_HEADER = struct.Struct("<II")
_MASK = 2**32 - 1
_NO_NUMBER = 0
"""Result of the XOR for a frame of version 0.1, which did not add the number."""
_SUFFIX = ".spool"
_SCAN_BYTES = 1024 * 1024
_MIN_FRAME = _HEADER.size + 1
SEGMENT_BYTES = 16 * 1024 * 1024
MAX_BYTES = 1024 * 1024 * 1024


class AppendFile:
    """File that only grows, by complete writes.

    Args:
        path: Created if missing, readable by its owner only.
        size: End of the valid content; the rest is truncated.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._dirty = os.fstat(self._fd).st_size != size
        if self._dirty:  # now: a reader must not see a torn tail before the next frame
            self._cut()

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing.

        Raises:
            OSError: If the disk is full, or the file cannot be written.
        """
        if self._dirty:
            self._cut()
        self._dirty = True
        written = os.write(self._fd, data)
        if written == len(data):
            self.size += written
            self._dirty = False
            return
        # The disk is full: the next append truncates this part first.
        msg = f"only {written} of {len(data)} bytes could be written"
        raise OSError(msg)

    def _cut(self) -> None:
        os.ftruncate(self._fd, self.size)
        self._dirty = False

    def close(self) -> None:
        """Close the file; its content stays."""
        os.close(self._fd)


class Spool:
    """Writer of a spool; one at a time for a directory.

    Args:
        directory: Created if missing. Existing records keep their numbers.
        segment_bytes: Size after which a new segment is started.
        max_bytes: Maximum size of all segments that :meth:`SpoolReader.discard` has not deleted.
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
        self.count, size = _find_end(last)
        """Number of the newest record; 0 when there is none."""
        self._file = AppendFile(last.path, size)

    def append(self, payload: bytes) -> None:
        """Write one record; once this returns, only the loss of the machine can lose it.

        Raises:
            OSError: If the disk or the spool is full.
        """
        if self._file.size >= self._segment_bytes:
            self._next_segment()
        number = self.count + 1
        # The number is in the checksum instead of beside it: after damage a valid frame proves
        # which record it is, so later records keep their numbers and the server can drop
        # duplicates.
        checksum = crc32(payload) ^ (number & _MASK)
        self._file.append(_HEADER.pack(len(payload), checksum) + payload)
        self.count = number

    def close(self) -> None:
        """Close the newest segment; the records stay for a reader."""
        self._file.close()

    def _next_segment(self) -> None:
        stored_bytes = sum(_size(segment.path) for segment in _segments(self.directory))
        if stored_bytes >= self._max_bytes:
            msg = f"{self.directory} holds {stored_bytes} bytes that were not uploaded yet"
            raise OSError(msg)
        first = self.count + 1
        following = AppendFile(self.directory / _name(first), 0)
        self._file.close()
        self._file = following


class SpoolReader:
    """Reader of a spool: returns the records in order, from any number.

    It may run concurrently with a writer, and sees each record once its write is complete.

    Args:
        directory: Directory of the spool.
        ended: No writer is left: a damaged last record is lost, not incomplete.
    """

    def __init__(self, directory: Path, *, ended: bool = False) -> None:
        self.directory = directory
        self._ended = ended
        self._next = 1
        self._was_sought = False
        self._segment: _Segment | None = None
        self._offset = 0
        self._number = 1  # number of the record at _offset
        self._searched_range = (0, 0)  # offset and size of a range without a valid frame

    def seek(self, number: int) -> None:
        """Continue with record ``number``; missing records are returned as empty payloads."""
        self._next, self._was_sought = number, True
        if number < self._number:
            self._segment = None

    def read(self, max_bytes: int) -> tuple[int, list[bytes]]:
        """Return the next records and advance.

        Args:
            max_bytes: Approximate size to read; at least one record is read completely.

        Returns:
            Number of the first record and the payloads, empty for lost records; no payloads at the
            end of the spool.
        """
        while True:
            segments = _segments(self.directory)
            if self._segment is None and not self._locate(segments):
                return self._next, []
            assert self._segment is not None
            # Listed before the read: a segment with a successor does not grow any more.
            later = [segment for segment in segments if segment.first > self._segment.first]
            payloads, consumed = _read_frames(
                self._segment.path, self._offset, self._number, max_bytes
            )
            self._offset += consumed
            if not payloads:
                lost = self._skip_damage(later[0] if later else None)
                if lost is None:
                    return self._next, []
                payloads = [b""] * lost
            first, self._number = self._number, self._number + len(payloads)
            requested = payloads[max(0, self._next - first) :]
            if requested:
                self._next = self._number
                return self._next - len(requested), requested

    def discard(self, through: int) -> None:
        """Delete the segments whose records all have numbers up to ``through``."""
        segments = _segments(self.directory)
        for segment, following in pairwise(segments):
            if following.first <= through + 1:
                segment.path.unlink(missing_ok=True)

    def _locate(self, segments: "list[_Segment]") -> bool:
        """Open the segment of the next record, or the oldest one."""
        if not segments:
            return False
        earlier = [segment for segment in segments if segment.first <= self._next]
        self._segment = (earlier or segments)[-1 if earlier else 0]
        self._offset, self._number = 0, self._segment.first
        if (
            self._next < self._number and self._was_sought
        ):  # requested by seek(), but deleted: skip it
            self._segment, self._number = _Segment(self._next, self._segment.path), self._next
            self._offset = _size(self._segment.path)
        self._next = max(self._next, self._number)
        return True

    def _skip_damage(self, following: "_Segment | None") -> int | None:
        """Skip an unreadable range; return how many records it held, None at the end."""
        assert self._segment is not None
        path, size = self._segment.path, _size(self._segment.path)
        # A search reads the rest of the segment, so it is repeated only when the segment has grown.
        if self._searched_range != (self._offset, size):
            frame = _find_valid_frame(path, self._offset, self._number)
            if frame is not None:
                self._offset, number = frame
                return number - self._number
            self._searched_range = (self._offset, size)
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
    """Return a file's size in bytes; 0 if the reader has just deleted it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_frames(path: Path, offset: int, number: int, max_bytes: int) -> tuple[list[bytes], int]:
    """Read complete frames from ``offset``, the first of which holds record ``number``.

    Returns:
        Their payloads, and their size in bytes.
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
        frame_number = crc32(payload) ^ checksum
        if frame_number != number & _MASK and frame_number != _NO_NUMBER:
            break
        payloads.append(payload)
        number += 1
        position = start + length
    return payloads, position


def _find_valid_frame(path: Path, offset: int, number: int) -> tuple[int, int] | None:
    """Return offset and number of the first valid frame from ``offset``."""
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
        frame_number = crc32(data[start : start + length]) ^ checksum
        if frame_number == _NO_NUMBER:
            return offset + position, number + (position > 0)
        # A frame needs `_MIN_FRAME` bytes, so fewer than this many records fit in between: a larger
        # number is a chance match of the checksum.
        skipped = (frame_number - number) & _MASK
        if skipped <= position // _MIN_FRAME:
            return offset + position, number + skipped
    return None


def _is_damaged(path: Path, offset: int, number: int) -> bool:
    """Whether an invalid last frame has its full length: then it was damaged, not torn."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return False
    if len(data) < _MIN_FRAME:
        return False
    length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]  # only the length is damaged, or:
    return bool(crc32(payload) ^ checksum == number & _MASK or 0 < length <= len(payload))


def _find_end(segment: _Segment) -> tuple[int, int]:
    """Return the number of a segment's last record, and its end in bytes."""
    number, offset = segment.first, 0
    while True:
        payloads, consumed = _read_frames(segment.path, offset, number, _SCAN_BYTES)
        if payloads:
            number += len(payloads)
            offset += consumed
            continue
        frame = _find_valid_frame(segment.path, offset, number)
        if frame is not None:
            offset, number = frame
        elif _is_damaged(segment.path, offset, number):
            return number, _size(segment.path)  # keeps its number: the server may have stored it
        else:
            return number - 1, offset
