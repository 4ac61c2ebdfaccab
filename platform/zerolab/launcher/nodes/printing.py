"""Shows kept files as they grow, in a thread of its own: a reader may pause as long as he likes.

What is to be shown is read back from the files, so that a pause costs no memory, and holds up
neither the ranks nor the signs of life that their machines wait for.
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
"""That one look takes from one file."""
_LONGEST_LINE_BYTES = 1 << 18
"""A longer one is shown as several."""
_WRITE_BYTES = 4096
"""At once: a pipe that can take something takes so much without making us wait (``PIPE_BUF``)."""
_LOOK_S = 0.1
_PROGRESS_S, _PROGRESS_TO_A_FILE_S = 1.0, 10.0
"""Between two states of a line that is redrawn, on a terminal and elsewhere."""
_AFTER_STOP_S = 5.0
"""A reader who takes nothing for so long is waited for no more, once the run was told to stop."""
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class View:
    r"""The lines of a file, from where it ends now.

    Of a line that is redrawn with ``\r``, as by a progress bar, the newest state counts.

    Args:
        file: Descriptor of the file, open to read.
        place: Stands before each line.
        stream: ``out`` or ``err``.
    """

    def __init__(self, file: int, place: str, stream: str) -> None:
        self.place = place
        self.stream = stream
        self.queued = False
        """Whether the thread is to look at it; for the printer alone."""
        self.progress_at = 0.0
        """When a state was shown last, on the monotonic clock."""
        self._file = file
        self._read = os.fstat(file).st_size
        self._rest = b""
        self._state: str | None = None

    @property
    def position(self) -> int:
        """How much of the file has been looked at, in bytes."""
        return self._read

    @property
    def size(self) -> int:
        """How large the file is, in bytes."""
        return os.fstat(self._file).st_size

    @property
    def is_redrawn(self) -> bool:
        """Whether there is a line that is redrawn, and has not ended."""
        return b"\r" in self._rest

    def lines(self) -> list[str] | None:
        """Return the lines that a look finds; None where the file has nothing more."""
        if self.size < self._read:  # somebody has emptied it
            self._read = 0
        content = os.pread(self._file, _PIECE_BYTES, self._read)
        if not content:
            return None
        self._read += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = [line for one in whole if (line := self._ended(one)) is not None]
        if b"\r" in self._rest:
            self._rest = _newest(self._rest)
        while len(self._rest) >= _LONGEST_LINE_BYTES:
            end = _whole_characters(self._rest, _LONGEST_LINE_BYTES)
            lines.append(_state(self._rest[:end]))
            self._rest = self._rest[end:]
        return lines

    def state(self) -> str | None:
        """Return the newest state of a line that is redrawn, if it is another one than before."""
        state = _state(self._rest[: _whole_characters(self._rest, len(self._rest))])
        if not self.is_redrawn or not state or state == self._state:
            return None
        self._state = state
        return state

    def rest(self) -> str | None:
        """Return a last line without its end, if there is one."""
        rest, self._rest = self._rest, b""
        return self._ended(rest) if rest else None

    def _ended(self, line: bytes) -> str | None:
        """The text of a line that has ended, unless it has been shown just so."""
        shown, self._state = self._state, None
        if b"\r" not in line:
            return line.decode(errors="replace")
        text = _state(line)
        return None if text and text == shown else text


def _state(line: bytes) -> str:
    """What stands there after a line was redrawn; one that was wiped is as it was before."""
    states = line.decode(errors="replace").split("\r")
    return next((one for one in reversed(states) if not _is_blank(one)), "")


def _is_blank(text: str) -> bool:
    return not _TERMINAL_CODE.sub("", text).strip()


def _newest(line: bytes) -> bytes:
    """Forget all states of a line but the newest, and what follows it."""
    states = line.split(b"\r")
    shown = (i for i in reversed(range(len(states))) if states[i].strip())
    return b"\r" + b"\r".join(states[next(shown, len(states) - 1) :])


def _whole_characters(content: bytes, end: int) -> int:
    """Go back from ``end`` to where no character of UTF-8 is split."""
    for back in range(1, min(4, end + 1)):
        byte = content[end - back]
        if byte >= 0xC0:  # the first of as many bytes as it has leading ones
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end if size <= back else end - back
        if byte < 0x80:
            break
    return end


class _Sentence(NamedTuple):
    """A line of the command itself."""

    text: str
    behind: list[tuple["View", int]]
    """Views, and how far they are shown before it, in bytes."""

    def waits(self) -> bool:
        return any(view.position < end for view, end in self.behind)


class _LeftAloneError(Exception):
    """Nobody reads any more, and we wait no longer."""


class Printer:
    """Shows the lines of views as ``[place] text``, and sentences between them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[View | _Sentence] = deque()  # a view at most once
        self._views: list[View] = []
        self._closing = False
        self._hurried = 0
        self._left_alone = threading.Event()
        self._taken_at = 0.0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, view: View) -> None:
        """Show this view's lines from now on."""
        with self._changed:
            self._views.append(view)

    def look(self, view: View) -> None:
        """Hear that a view's file has grown.

        Raises:
            OSError: If nothing can be shown, as where the reader is gone.
        """
        if self._error is not None:
            raise self._error
        with self._changed:
            if not view.queued:
                view.queued = True
                self._queue.append(view)
                self._changed.notify()

    def say(self, text: str) -> None:
        """Show a sentence on standard error, behind what was to be shown before."""
        with self._changed:
            behind = [(view, view.size) for view in self._views]
            self._queue.append(_Sentence(text, behind))
            self._changed.notify()

    def hurry(self) -> None:
        """Hear that the run was told to stop; may be called by a signal handler."""
        self._hurried += 1

    def close(self) -> bool:
        """Wait until all is shown, and return whether it was.

        After :meth:`hurry` a reader who takes nothing is not waited for.

        Raises:
            OSError: If it could not be shown.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        since, hurried = time.monotonic(), self._hurried
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            idle_s = time.monotonic() - max(since, self._taken_at)
            # Told while we wait for the reader alone: he is what shall be waited for no more.
            if self._hurried > hurried or (hurried and idle_s > _AFTER_STOP_S):
                self._left_alone.set()
                self._thread.join(_LOOK_S * 5)
                break
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None or not self._closing:
                if isinstance(item, _Sentence):
                    self._write([item.text], "err")
                elif item is not None and (lines := item.lines()) is not None:
                    self._show(item, lines)
                    self.look(item)  # for more, behind the others
                self._show_progress()
            for view in self._views:
                if (rest := view.rest()) is not None:
                    self._show(view, [rest])
        except OSError as error:
            self._error = error
        except _LeftAloneError:
            self._say_last()

    def _say_last(self) -> None:
        """Show the sentences that are left where somebody takes them at once: how the run ended."""
        for item in self._queue:
            if isinstance(item, _Sentence):
                with contextlib.suppress(OSError, _LeftAloneError):
                    self._write([item.text], "err", wait_s=0.0)

    def _next(self) -> View | _Sentence | None:
        with self._changed:
            if not self._queue and not self._closing:
                redrawn = any(view.is_redrawn for view in self._views)
                self._changed.wait(_LOOK_S if redrawn else None)
            item = self._queue.popleft() if self._queue else None
            if isinstance(item, _Sentence) and item.waits():
                first = next((one for one in self._queue if isinstance(one, View)), None)
                if first is not None:
                    self._queue.remove(first)
                    self._queue.appendleft(item)
                    item = first
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
        self._write([f"[{view.place}] {line}" for line in lines], view.stream)

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
            if not ready.poll(wait_s * 1000):
                if self._left_alone.is_set():
                    raise _LeftAloneError
                continue
            try:
                content = content[os.write(descriptor, content[:_WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            self._taken_at = time.monotonic()


def _stream(name: str) -> TextIO | None:
    """Standard output or error; None where it is closed."""
    return sys.stdout if name == "out" else sys.stderr
