"""The block ``checkpoint_storage``: location, credentials and retention of checkpoints."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from zerolab.contract.secret_text import MASK
from zerolab.contract.secrets import STORAGE_SECRETS
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError
from zerolab.schema.section import NonNegativeInt, Section, drop_nulls, validate

__all__ = ["CheckpointStorageConfig", "address_of", "read_address", "storage_problems"]


def _secret(value: Any) -> Any:
    """Reject a value that is not text, without showing it."""
    if value is not None and not isinstance(value, str):
        raise ValueError("must be text, got another kind of value; put it into quotes")
    return value


Secret = Annotated[str | None, BeforeValidator(_secret)]


class CheckpointStorageConfig(Section):
    """Storage and retention of checkpoints."""

    type: Literal["shared_fs", "directory", "s3", "gcs", "azure"] | None = None
    """``shared_fs`` or ``directory``: a directory that every machine sees at the same path;
    ``s3``, ``gcs`` or ``azure``: a bucket; by default the installation's directory."""

    host_path: str | None = None
    """The directory of ``shared_fs``."""

    storage_path: str | None = None
    """A folder inside it."""

    container_path: str | None = None
    """The directory of ``directory``."""

    bucket: str | None = None
    """The bucket of ``s3`` or ``gcs``."""

    prefix: str | None = None
    """Prefix of all object names, in ``s3`` or ``gcs``."""

    endpoint_url: str | None = None
    """Address of an S3-compatible store other than Amazon's, e.g. ``http://minio:9000``."""

    access_key: Secret = None
    """Of ``s3``, together with ``secret_key``; by default each machine's credentials. Never
    shown."""

    secret_key: Secret = None
    """Of ``s3``. Never shown."""

    container: str | None = None
    """The container of ``azure``."""

    connection_string: Secret = None
    """Of ``azure``; this or ``account_url``. Never shown."""

    account_url: str | None = None
    """Of ``azure``, e.g. ``https://name.blob.core.windows.net``."""

    credential: Secret = None
    """Of ``azure`` with ``account_url``; by default the machine's credentials. Never shown."""

    save_experiment_best: NonNegativeInt = 0
    """Checkpoints kept of the experiment: those with the best metric."""

    save_trial_best: NonNegativeInt = 1
    """Checkpoints kept of each trial: those with the best metric."""

    save_trial_latest: NonNegativeInt = 1
    """Checkpoints kept of each trial: the newest."""


_KEYS: Mapping[str, tuple[str, ...]] = {
    "shared_fs": ("host_path", "storage_path"),
    "directory": ("container_path",),
    "s3": ("bucket", "prefix", "endpoint_url", "access_key", "secret_key"),
    "gcs": ("bucket", "prefix"),
    "azure": ("container", "connection_string", "account_url", "credential"),
}
"""Keys of the location of each kind; the first key is required."""

_DESCRIPTIONS = {"host_path": "a directory", "container_path": "a directory"}
_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}


def storage_problems(storage: CheckpointStorageConfig) -> Iterator[str]:
    """Yield conflicts between keys of the block."""
    kind = storage.type or ""
    location_keys = _KEYS.get(kind, ())
    if location_keys and not getattr(storage, location_keys[0]):
        what = _DESCRIPTIONS.get(location_keys[0], f"the {location_keys[0]}")
        yield (
            f"checkpoint_storage.{location_keys[0]}: is required for type {kind!r}, got nothing; "
            f"name {what}"
        )
    for key in dict.fromkeys(key for keys in _KEYS.values() for key in keys):
        if getattr(storage, key) is not None and key not in location_keys:
            yield _misplaced(storage, key)
    for key in STORAGE_SECRETS:
        if getattr(storage, key) == MASK:
            yield (
                f"checkpoint_storage.{key}: must be the key itself, got the mask that responses "
                "show instead; write it, or leave it out if machines have credentials"
            )
    yield from _directory_problems(storage)
    yield from _bucket_problems(storage)


def _misplaced(storage: CheckpointStorageConfig, key: str) -> str:
    kinds = " or ".join(kind for kind, keys in _KEYS.items() if key in keys)
    if storage.type is None:
        return f"checkpoint_storage.type: is required with {key}, got nothing; set it to {kinds}"
    return (
        f"checkpoint_storage.{key}: does not belong to the type {storage.type}; remove it or set "
        f"checkpoint_storage.type to {kinds}"
    )


def _directory_problems(storage: CheckpointStorageConfig) -> Iterator[str]:
    for key in ("host_path", "container_path"):
        path = getattr(storage, key)
        if path and not path.startswith("/"):
            yield f"checkpoint_storage.{key}: must be an absolute path, got {path!r}"
    inside = storage.storage_path
    if inside and not _is_inside(inside, storage.host_path or ""):
        yield (
            "checkpoint_storage.storage_path: must be a path inside host_path, relative to it or "
            f"whole, got {inside!r}"
        )


def _bucket_problems(storage: CheckpointStorageConfig) -> Iterator[str]:
    prefix = storage.prefix or ""
    if ".." in prefix.split("/"):
        yield f"checkpoint_storage.prefix: must not contain '..', got {prefix!r}"
    for key in ("bucket", "container"):
        name = getattr(storage, key) or ""
        if "/" in name or "?" in name or "#" in name:
            yield f"checkpoint_storage.{key}: must be a name alone, without '/', got {name!r}"
    if (storage.access_key is None) != (storage.secret_key is None):
        present, missing = ("access_key", "secret_key")
        if storage.access_key is None:
            present, missing = missing, present
        yield f"checkpoint_storage.{missing}: is required with {present}, got nothing; give both"
    yield from _url_problems("endpoint_url", storage.endpoint_url)
    yield from _url_problems("account_url", storage.account_url)
    if storage.type == "azure":
        if (storage.connection_string is None) == (storage.account_url is None):
            got = "both" if storage.account_url else "none"
            yield (
                "checkpoint_storage: exactly one of connection_string and account_url must be "
                f"given for type 'azure', got {got}"
            )
        if storage.credential is not None and storage.account_url is None:
            yield (
                "checkpoint_storage.credential: belongs to account_url; a connection_string "
                "has its own; remove it"
            )


def _url_problems(key: str, url: str | None) -> Iterator[str]:
    if url is None:
        return
    parts = urlsplit(url)
    if parts.username or parts.password:
        yield f"checkpoint_storage.{key}: must not hold a name and a password; use the keys for it"
    elif parts.query or parts.fragment:
        yield f"checkpoint_storage.{key}: must end with the path; use the keys for a signature"
    elif parts.scheme not in {"http", "https"} or not parts.netloc:
        yield f"checkpoint_storage.{key}: must look like https://host:port, got {url!r}"


def _is_inside(path: str, root: str) -> bool:
    """Return whether a path stays below ``root``."""
    if ".." in path.split("/"):
        return False
    return not path.startswith("/") or bool(root and PurePosixPath(path).is_relative_to(root))


def address_of(storage: CheckpointStorageConfig) -> StorageAddress | None:
    """Return the address of the storage; None for the installation's directory."""
    if storage.type is None:
        return None
    if storage.type == "shared_fs":
        return StorageAddress(
            root=str(PurePosixPath(storage.host_path or "/", storage.storage_path or ""))
        )
    if storage.type == "directory":
        return StorageAddress(root=str(PurePosixPath(storage.container_path or "/")))
    bucket = storage.container if storage.type == "azure" else storage.bucket
    prefix = (storage.prefix or "").strip("/")
    url = f"{_SCHEMES[storage.type]}://{bucket}"
    options = {
        key: str(getattr(storage, key))
        for key in _KEYS[storage.type]
        if key not in {"bucket", "container", "prefix"} and getattr(storage, key) is not None
    }
    return StorageAddress(root=f"{url}/{prefix}" if prefix else url, options=options)


def read_address(block: Mapping[str, Any]) -> StorageAddress | None:
    """Read a block ``checkpoint_storage`` outside of an experiment file.

    Raises:
        ConfigError: With all its problems.
    """
    values = drop_nulls(block, frozenset())
    storage, problems, _ = validate(CheckpointStorageConfig, values)
    problems = [f"checkpoint_storage.{problem}" for problem in problems]
    if storage is not None:
        problems += storage_problems(storage)
    if problems or storage is None:
        raise ConfigError("checkpoint storage", problems)
    return address_of(storage)
