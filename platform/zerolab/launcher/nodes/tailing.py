"""What is written to the ranks' output files, as it comes."""

import re
from collections.abc import Iterator
from pathlib import Path

from zerolab.launcher.nodes.messages import Said

__all__ = ["Tails"]

_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")
_MOST_BYTES = 1 << 18
"""That one look takes from one file."""


class Tails:
    """Reads on where it stopped.

    Args:
        logs: Directory of the files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[str, int] = {}
        self._unended: dict[str, Said] = {}

    def read(self) -> list[Said]:
        """Return what has been written since, a piece of each file."""
        pieces = []
        for path in sorted(self._logs.iterdir()):
            named = _RANK_FILE.fullmatch(path.name)
            if named is None:
                continue
            start = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            if not content:
                continue
            self._read[path.name] = start + len(content)
            rank, stream = int(named[1]), named[2]
            pieces.append(Said(content, rank, stream))
            if content.endswith(b"\n"):
                self._unended.pop(path.name, None)
            else:
                self._unended[path.name] = Said(b"\n", rank, stream)
        return pieces

    def read_rest(self) -> Iterator[Said]:
        """Yield all that is left, and ends for last lines without one: others may follow."""
        while pieces := self.read():
            yield from pieces
        yield from self._unended.values()
        self._unended.clear()
