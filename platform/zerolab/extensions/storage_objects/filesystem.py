"""fsspec file system of a storage address: required package and options."""

import importlib.util
from typing import Any
from urllib.parse import urlsplit

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError

__all__ = ["check_installed", "missing_package", "open_remote"]

_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure")}
"""Scheme of a URL to the package that reads it, and Zerolab's extra that installs it."""

_CONNECT_S = 10
_READ_S = 60
_TRIES = 3
_PARTS_AT_ONCE = 4
"""Parts of a file in memory at the same time during a transfer."""


def missing_package(address: StorageAddress) -> str | None:
    """Return an error if the package of a storage is not installed, else None."""
    package, extra = _EXTRAS.get(address.scheme, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return (
        f"{address.root} needs the package {package}, which is not installed here; "
        f"pip install 'zerolab[{extra}]'"
    )


def check_installed(address: StorageAddress) -> None:
    """Raise if this machine cannot open a storage.

    Raises:
        ConfigError: If its package is not installed.
    """
    problem = missing_package(address)
    if problem:
        raise ConfigError("checkpoint storage", [problem])


def open_remote(address: StorageAddress) -> tuple[Any, str]:
    """Return an fsspec file system and the path of its root, without contacting the storage.

    Raises:
        ConfigError: If its package is not installed.
    """
    check_installed(address)
    import fsspec

    # Neither instances nor listings are cached: other processes write and delete there, too.
    shared = {"skip_instance_cache": True, "use_listings_cache": False}
    opened = fsspec.core.url_to_fs(address.root, **shared, **_arguments(address))
    return opened[0], str(opened[1]).rstrip("/")


def _arguments(address: StorageAddress) -> dict[str, Any]:
    options = address.options
    if address.scheme == "s3":
        return {
            "key": options.get("access_key"),
            "secret": options.get("secret_key"),
            "endpoint_url": options.get("endpoint_url"),
            "max_concurrency": _PARTS_AT_ONCE,
            "config_kwargs": {
                "connect_timeout": _CONNECT_S,
                "read_timeout": _READ_S,
                "retries": {"max_attempts": _TRIES, "mode": "standard"},
            },
        }
    if address.scheme == "az" and options:  # else the machine's own credentials
        return _azure(options)
    return {}


def _azure(options: dict[str, str]) -> dict[str, Any]:
    if "connection_string" in options:
        return {"connection_string": options["connection_string"]}
    url = options.get("account_url", "")
    host, account = urlsplit(url).netloc, urlsplit(url).path.strip("/")
    if account and "credential" in options:  # the URL form of emulators and Azure Stack
        secret = options["credential"]
        kind = "SharedAccessSignature" if "sig=" in secret else "AccountKey"
        connection = f"BlobEndpoint={url};AccountName={account};{kind}={secret}"
        return {"connection_string": connection}
    return {
        "account_name": host.partition(".")[0],
        "account_host": host,
        "credential": options.get("credential"),
    }
