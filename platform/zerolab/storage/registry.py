"""Registry of the storage backends; others are added as extensions.

A new backend is one file and one entry point of the group ``zerolab.storage_backends``.
"""

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError
from zerolab.registry import Registry, subclass_of
from zerolab.storage.objects import ObjectStore
from zerolab.storage.section import DirectoryConfig, SharedFsConfig, StorageConfig

__all__ = ["STORAGE_BACKENDS", "check_installed", "open_objects", "storage_problem"]


STORAGE_BACKENDS: Registry[type[StorageConfig]] = Registry(
    "zerolab.storage_backends",
    {
        "shared_fs": SharedFsConfig,
        "directory": DirectoryConfig,
    },
    subclass_of(StorageConfig),  # type: ignore[type-abstract]
)
"""Values of ``checkpoint_storage.type``, with the keys of each."""


def storage_problem(address: StorageAddress) -> str | None:
    """Return why this machine cannot open a storage, or None."""
    if not address.is_remote:
        return None
    backend = _backend(address)
    if backend is not None:
        return backend.missing_package(address)
    problem = STORAGE_BACKENDS.problem(address.scheme) or (
        f"no installed storage backend opens {address.scheme}:// URLs"
    )
    return f"{address.root} cannot be opened: {problem}"


def check_installed(address: StorageAddress) -> None:
    """Raise if this machine cannot open a storage.

    Raises:
        ConfigError: If its extension or its package is not installed.
    """
    problem = storage_problem(address)
    if problem:
        raise ConfigError("checkpoint storage", [problem])


def open_objects(address: StorageAddress) -> ObjectStore:
    """Open an object store without contacting it.

    Raises:
        ConfigError: If its extension or its package is not installed.
        StorageError: If its options are invalid.
    """
    check_installed(address)
    backend = _backend(address)
    assert backend is not None
    return backend.open(address)


def _backend(address: StorageAddress) -> type[StorageConfig] | None:
    backends = STORAGE_BACKENDS.loadable().values()
    schemes = address.scheme, "*"
    return next((b for scheme in schemes for b in backends if scheme in b.schemes), None)
