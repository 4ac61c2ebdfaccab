"""Reader of new output in the ranks' files."""

import re
from collections.abc import Iterator
from pathlib import Path

from zerolab.extensions.launcher_ssh.messages import RankOutput

__all__ = ["OutputTails"]

_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")
_MOST_BYTES = 1 << 18
"""Maximum bytes that one call reads from a file."""


class OutputTails:
    """Readers of the ranks' files that continue at their last positions.

    Args:
        logs: Directory of the files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[str, int] = {}
        self._unended: dict[str, RankOutput] = {}

    def read(self) -> list[RankOutput]:
        """Return new output, a piece of each file."""
        pieces = []
        for path in sorted(self._logs.iterdir()):
            match = _RANK_FILE.fullmatch(path.name)
            if match is None:
                continue
            start = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            if not content:
                continue
            self._read[path.name] = start + len(content)
            rank, stream = int(match[1]), match[2]
            pieces.append(RankOutput(content, rank, stream))
            if content.endswith(b"\n"):
                self._unended.pop(path.name, None)
            else:
                self._unended[path.name] = RankOutput(b"\n", rank, stream)
        return pieces

    def read_rest(self) -> Iterator[RankOutput]:
        """Yield all remaining output, with line ends for last lines that lack one."""
        while pieces := self.read():
            yield from pieces
        yield from self._unended.values()
        self._unended.clear()
