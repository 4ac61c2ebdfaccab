"""Printer of growing files, in a thread, so that a slow reader blocks nothing.

The text is read back from the files. A blocked reader therefore costs no memory, and delays
neither the ranks nor the heartbeats of their machines.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time
from collections import deque
from typing import NamedTuple, TextIO

__all__ = ["Printer", "View"]

_PIECE_BYTES = 1 << 16
"""Maximum bytes that one step reads from a file."""
_LONGEST_LINE_BYTES = 1 << 18
"""Longer lines are split."""
_WRITE_BYTES = 4096
"""Bytes of a write; a writable pipe accepts this many without blocking (``PIPE_BUF``)."""
_LOOK_S = 0.1
_PROGRESS_S, _PROGRESS_TO_A_FILE_S = 1.0, 10.0
"""Intervals between states of a line that is redrawn, on a terminal and elsewhere."""
_AFTER_STOP_S = 5.0
"""Maximum wait for a blocked reader after the run was stopped."""
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class View:
    r"""Lines of a file, from its current end.

    A line that is redrawn with ``\r``, e.g. by a progress bar, has its newest state.

    Args:
        file: File descriptor, open for reading.
        label: Prefix of each line.
        stream: ``out`` or ``err``.
    """

    def __init__(self, file: int, label: str, stream: str) -> None:
        self.label = label
        self.stream = stream
        self.queued = False
        """Whether the view is in the printer's queue."""
        self.progress_at = 0.0
        """Time of the last shown state, on the monotonic clock."""
        self._file = file
        self._read = os.fstat(file).st_size
        self._rest = b""
        self._state: str | None = None

    @property
    def position(self) -> int:
        """Bytes of the file that have been read."""
        return self._read

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file).st_size

    @property
    def is_redrawn(self) -> bool:
        """Return whether the last line is redrawn and has no end yet."""
        return b"\r" in self._rest

    def lines(self) -> list[str] | None:
        """Return the next lines; None at the end of the file."""
        if self.size < self._read:  # it was truncated
            self._read = 0
        content = os.pread(self._file, _PIECE_BYTES, self._read)
        if not content:
            return None
        self._read += len(content)
        *finished, self._rest = (self._rest + content).split(b"\n")
        lines = [line for part in finished if (line := self._finished_text(part)) is not None]
        if b"\r" in self._rest:
            self._rest = _newest(self._rest)
        while len(self._rest) >= _LONGEST_LINE_BYTES:
            end = _whole_characters(self._rest, _LONGEST_LINE_BYTES)
            lines.append(_state(self._rest[:end]))
            self._rest = self._rest[end:]
        return lines

    def state(self) -> str | None:
        """Return the newest state of a line that is redrawn, if it has changed."""
        state = _state(self._rest[: _whole_characters(self._rest, len(self._rest))])
        if not self.is_redrawn or not state or state == self._state:
            return None
        self._state = state
        return state

    def rest(self) -> str | None:
        """Return a last line without a line end, if there is one."""
        content, self._rest = self._rest, b""
        return self._finished_text(content) if content else None

    def _finished_text(self, line: bytes) -> str | None:
        """Return the text of a finished line, unless it is already shown."""
        shown, self._state = self._state, None
        if b"\r" not in line:
            return line.decode(errors="replace")
        text = _state(line)
        return None if text and text == shown else text


def _state(line: bytes) -> str:
    """Return the visible text of a redrawn line; a cleared line keeps its previous text."""
    states = line.decode(errors="replace").split("\r")
    return next((state for state in reversed(states) if not _is_blank(state)), "")


def _is_blank(text: str) -> bool:
    return not _TERMINAL_CODE.sub("", text).strip()


def _newest(line: bytes) -> bytes:
    """Drop all states of a line except the newest."""
    states = line.split(b"\r")
    shown = (i for i in reversed(range(len(states))) if states[i].strip())
    return b"\r" + b"\r".join(states[next(shown, len(states) - 1) :])


def _whole_characters(content: bytes, end: int) -> int:
    """Return the last position up to ``end`` that splits no UTF-8 character."""
    for back in range(1, min(4, end + 1)):
        byte = content[end - back]
        if byte >= 0xC0:  # first byte: its leading ones are the character's length
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end if size <= back else end - back
        if byte < 0x80:
            break
    return end


class _Message(NamedTuple):
    """A message of the command."""

    text: str
    positions: list[tuple["View", int]]
    """Positions in bytes up to which views are shown before it."""

    def waits(self) -> bool:
        return any(view.position < end for view, end in self.positions)


class _ReaderBlockedError(Exception):
    """The reader is blocked, and the wait is over."""


class Printer:
    """Shows the lines of views as ``[label] text``, and messages between them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[View | _Message] = deque()  # a view at most once
        self._views: list[View] = []
        self._closing = False
        self._wait_limits = 0
        self._reader_blocked = threading.Event()
        self._written_at = 0.0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, view: View) -> None:
        """Start to show a view's lines."""
        with self._changed:
            self._views.append(view)

    def enqueue(self, view: View) -> None:
        """Queue a view whose file has grown.

        Raises:
            OSError: If nothing can be shown, e.g. because the reader has exited.
        """
        if self._error is not None:
            raise self._error
        with self._changed:
            if not view.queued:
                view.queued = True
                self._queue.append(view)
                self._changed.notify()

    def print_message(self, text: str) -> None:
        """Show a message on standard error, after everything that is queued."""
        with self._changed:
            positions = [(view, view.size) for view in self._views]
            self._queue.append(_Message(text, positions))
            self._changed.notify()

    def limit_wait(self) -> None:
        """Limit the wait for a blocked reader; may be called by a signal handler."""
        self._wait_limits += 1

    def close(self) -> bool:
        """Wait until everything is shown, and return whether it was.

        After :meth:`limit_wait` the wait for a blocked reader is limited.

        Raises:
            OSError: If something could not be shown.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        since, wait_limits = time.monotonic(), self._wait_limits
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            idle_s = time.monotonic() - max(since, self._written_at)
            # Only the reader delays the end: limit the wait for it.
            if self._wait_limits > wait_limits or (wait_limits and idle_s > _AFTER_STOP_S):
                self._reader_blocked.set()
                self._thread.join(_LOOK_S * 5)
                break
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None or not self._closing:
                if isinstance(item, _Message):
                    self._write([item.text], "err")
                elif item is not None and (lines := item.lines()) is not None:
                    self._show(item, lines)
                    self.enqueue(item)  # continue later, after the others
                self._show_progress()
            for view in self._views:
                if (last_line := view.rest()) is not None:
                    self._show(view, [last_line])
        except OSError as error:
            self._error = error
        except _ReaderBlockedError:
            self._flush_messages()

    def _flush_messages(self) -> None:
        """Show the remaining messages if the stream accepts them immediately."""
        for item in self._queue:
            if isinstance(item, _Message):
                with contextlib.suppress(OSError, _ReaderBlockedError):
                    self._write([item.text], "err", wait_s=0.0)

    def _next(self) -> View | _Message | None:
        with self._changed:
            if not self._queue and not self._closing:
                redrawn = any(view.is_redrawn for view in self._views)
                self._changed.wait(_LOOK_S if redrawn else None)
            item = self._queue.popleft() if self._queue else None
            if isinstance(item, _Message) and item.waits():
                # Output from before the message comes first: show a queued view instead.
                next_view = next((view for view in self._queue if isinstance(view, View)), None)
                if next_view is not None:
                    self._queue.remove(next_view)
                    self._queue.appendleft(item)
                    item = next_view
            if isinstance(item, View):
                item.queued = False
            return item

    def _show_progress(self) -> None:
        now = time.monotonic()
        for view in self._views:
            if not view.is_redrawn:
                continue
            stream = _stream(view.stream)
            terminal = stream is not None and stream.isatty()
            pause = _PROGRESS_S if terminal else _PROGRESS_TO_A_FILE_S
            first = view.progress_at == 0.0
            if (first or now - view.progress_at >= pause) and (state := view.state()) is not None:
                view.progress_at = now
                self._show(view, [state])

    def _show(self, view: View, lines: list[str]) -> None:
        self._write([f"[{view.label}] {line}" for line in lines], view.stream)

    def _write(self, lines: list[str], name: str, wait_s: float = _LOOK_S) -> None:
        stream = _stream(name)
        if stream is None or not lines:
            return
        text = "".join(f"{line}\n" for line in lines)
        content = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        descriptor = stream.fileno()
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        while content:
            # Poll first: a blocking write could not be interrupted after `limit_wait`.
            if not ready.poll(wait_s * 1000):
                if self._reader_blocked.is_set():
                    raise _ReaderBlockedError
                continue
            try:
                content = content[os.write(descriptor, content[:_WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            self._written_at = time.monotonic()


def _stream(name: str) -> TextIO | None:
    """Return standard output or error; None if it is closed."""
    return sys.stdout if name == "out" else sys.stderr
