"""The types ``s3``, ``gcs`` and ``azure`` of ``checkpoint_storage``."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from zerolab.contract.storage import StorageAddress
from zerolab.storage.objects import ObjectStore
from zerolab.storage.section import StorageConfig

__all__ = ["AzureConfig", "GcsConfig", "S3Config"]


def _secret(value: Any) -> Any:
    """Reject a value that is not text, without showing it."""
    if value is not None and not isinstance(value, str):
        raise ValueError("must be text, got another kind of value; put it into quotes")
    return value


def _name(name: str) -> str:
    if "/" in name or "?" in name or "#" in name:
        raise ValueError(f"must be a name without '/', got {name!r}")
    return name


def _prefix(prefix: str) -> str:
    if ".." in prefix.split("/"):
        raise ValueError(f"must not contain '..', got {prefix!r}")
    return prefix


def _url(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("must not hold a name and a password; use the keys for it")
    if parts.query or parts.fragment:
        raise ValueError("must end with the path; use the keys for a signature")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ValueError(f"must look like https://host:port, got {url!r}")
    return url


Secret = Annotated[str | None, BeforeValidator(_secret)]
Name = Annotated[str, AfterValidator(_name)]
Prefix = Annotated[str, AfterValidator(_prefix)]
Url = Annotated[str, AfterValidator(_url)]


class _ObjectStoreConfig(StorageConfig):
    @classmethod
    def missing_package(cls, address: StorageAddress) -> str | None:
        """Return an error if the package of a storage is not installed, else None."""
        from zerolab.extensions.storage_objects.filesystem import missing_package

        return missing_package(address)

    @classmethod
    def open(cls, address: StorageAddress) -> ObjectStore:
        """Return the object store at a URL, without contacting it."""
        from zerolab.extensions.storage_objects.object_store import FsspecStore

        return FsspecStore(address)


class _BucketConfig(_ObjectStoreConfig):
    bucket: Name
    """The bucket of ``s3`` or ``gcs``."""

    prefix: Prefix | None = None
    """Prefix of all object names, in ``s3`` or ``gcs``."""

    def url(self, scheme: str) -> str:
        """Return the URL of the prefix."""
        return f"{scheme}://{self.bucket}/{(self.prefix or '').strip('/')}".rstrip("/")


class S3Config(_BucketConfig):
    """A bucket of Amazon S3, or of a store with the same protocol."""

    schemes: ClassVar[frozenset[str]] = frozenset({"s3", "*"})  # fsspec opens other URLs, too

    endpoint_url: Url | None = None
    """Address of an S3-compatible store other than Amazon's, e.g. ``http://minio:9000``."""

    access_key: Secret = None
    """Of ``s3``, together with ``secret_key``; by default each machine's credentials. Never
    shown."""

    secret_key: Secret = None
    """Of ``s3``. Never shown."""

    def address(self) -> StorageAddress:
        """Return the URL of the prefix, with the endpoint and the credentials."""
        options = {
            "endpoint_url": self.endpoint_url,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }
        return StorageAddress(root=self.url("s3"), options=_given(options))

    def problems(self) -> Iterator[str]:
        """Report a key without the other."""
        if (self.access_key is None) != (self.secret_key is None):
            present, missing = "access_key", "secret_key"
            if self.access_key is None:
                present, missing = missing, present
            yield (
                f"checkpoint_storage.{missing}: is required with {present}, got nothing; give both"
            )


class GcsConfig(_BucketConfig):
    """A bucket of Google Cloud Storage."""

    schemes: ClassVar[frozenset[str]] = frozenset({"gs"})

    def address(self) -> StorageAddress:
        """Return the URL of the prefix."""
        return StorageAddress(root=self.url("gs"))


class AzureConfig(_ObjectStoreConfig):
    """A container of Azure's Blob Storage."""

    schemes: ClassVar[frozenset[str]] = frozenset({"az"})

    container: Name
    """The container of ``azure``."""

    connection_string: Secret = None
    """Of ``azure``; this or ``account_url``. Never shown."""

    account_url: Url | None = None
    """Of ``azure``, e.g. ``https://name.blob.core.windows.net``."""

    credential: Secret = None
    """Of ``azure`` with ``account_url``; by default the machine's credentials. Never shown."""

    def address(self) -> StorageAddress:
        """Return the URL of the container, with the credentials."""
        options = {
            "connection_string": self.connection_string,
            "account_url": self.account_url,
            "credential": self.credential,
        }
        return StorageAddress(root=f"az://{self.container}", options=_given(options))

    def problems(self) -> Iterator[str]:
        """Report credentials that do not belong together."""
        if (self.connection_string is None) == (self.account_url is None):
            got = "both" if self.account_url else "none"
            yield (
                "checkpoint_storage: exactly one of connection_string and account_url must be "
                f"given for type 'azure', got {got}"
            )
        if self.credential is not None and self.account_url is None:
            yield (
                "checkpoint_storage.credential: belongs to account_url; a connection_string "
                "has its own; remove it"
            )


def _given(options: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in options.items() if value is not None}
