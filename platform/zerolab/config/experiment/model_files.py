"""Files of a model directory."""

from pathlib import Path
from typing import Protocol

__all__ = ["FolderFiles", "ModelFiles"]


class ModelFiles(Protocol):
    """Interface to the files of a model directory."""

    def read(self, path: str) -> bytes | None:
        """Read a file by its path inside the directory; None if it is missing."""
        ...

    def names(self) -> list[str]:
        """Return the paths of all files."""
        ...


class FolderFiles:
    """A model directory on this machine.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes | None:
        """Read a file by its path inside the directory; None if it is missing."""
        file = self._root / path
        return file.read_bytes() if file.is_file() else None

    def names(self) -> list[str]:
        """Return the paths of the files in the directory itself, and of one level below."""
        files = [*self._root.glob("*"), *self._root.glob("*/*")]
        return sorted(str(file.relative_to(self._root)) for file in files if file.is_file())
