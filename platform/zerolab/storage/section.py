"""Keys of ``checkpoint_storage`` by its ``type``: the base class, and the types of the core."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from zerolab.contract.storage import StorageAddress
from zerolab.schema.section import Section
from zerolab.storage.objects import ObjectStore

__all__ = ["DirectoryConfig", "SharedFsConfig", "StorageConfig"]


class StorageConfig(Section):
    """Base of the keys of one ``type`` of checkpoint storage.

    The keys of all types are in one block, so a key with the same name has the same meaning.

    Example:
        >>> from zerolab.contract.storage import StorageAddress
        >>> from zerolab.storage.section import StorageConfig
        >>> class ArchiveConfig(StorageConfig):
        ...     schemes = frozenset({"archive"})
        ...     archive_path: str
        ...     def address(self):
        ...         return StorageAddress(root=f"archive://{self.archive_path}")
        >>> ArchiveConfig(archive_path="/mnt/archive").address().root
        'archive:///mnt/archive'
    """

    schemes: ClassVar[frozenset[str]] = frozenset()
    """Schemes of the URLs that :meth:`open` accepts; ``*`` for all that no other type accepts."""

    def problems(self) -> Iterator[str]:
        """Yield conflicts between the keys.

        Yields:
            Messages such as ``checkpoint_storage.key: must ...``.
        """
        yield from ()

    @abstractmethod
    def address(self) -> StorageAddress:
        """Return the address that the keys describe.

        Returns:
            A directory, or a URL with options.
        """

    @classmethod
    def missing_package(cls, address: StorageAddress) -> str | None:
        """Return an error if a package that opens the address is missing.

        Args:
            address: The address.

        Returns:
            The message; None if all packages are installed.
        """
        del address
        return None

    @classmethod
    def open(cls, address: StorageAddress) -> ObjectStore:
        """Return the object store at a URL, without contacting it.

        Args:
            address: The URL, of one of :attr:`schemes`, and its options.

        Returns:
            The store.

        Raises:
            ConfigError: If a package is not installed.
            StorageError: If the options are invalid.
        """
        raise NotImplementedError


def _absolute(path: str) -> str:
    if path and not path.startswith("/"):
        raise ValueError(f"must be an absolute path, got {path!r}")
    return path


Directory = Annotated[str, AfterValidator(_absolute)]


class SharedFsConfig(StorageConfig):
    """A directory that every machine sees at the same path."""

    host_path: Directory
    """The directory of ``shared_fs``."""

    storage_path: str | None = None
    """A folder inside it."""

    def problems(self) -> Iterator[str]:
        """Report a folder outside of ``host_path``."""
        inside = self.storage_path
        if inside and not _is_inside(inside, self.host_path):
            yield (
                "checkpoint_storage.storage_path: must be a path inside host_path, relative to it "
                f"or whole, got {inside!r}"
            )

    def address(self) -> StorageAddress:
        """Return the directory."""
        return StorageAddress(root=str(PurePosixPath(self.host_path, self.storage_path or "")))


class DirectoryConfig(StorageConfig):
    """A directory, by Determined's name for the one inside a container."""

    container_path: Directory
    """The directory of ``directory``."""

    def address(self) -> StorageAddress:
        """Return the directory."""
        return StorageAddress(root=str(PurePosixPath(self.container_path)))


def _is_inside(path: str, root: str) -> bool:
    """Return whether a path stays below ``root``."""
    if ".." in path.split("/"):
        return False
    return not path.startswith("/") or bool(root and PurePosixPath(path).is_relative_to(root))
