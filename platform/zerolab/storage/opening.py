"""From an address to an fsspec file system: its package, and its options in its own words."""

import importlib.util
from typing import Any
from urllib.parse import urlsplit

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError

__all__ = ["check_installed", "missing_package", "open_remote"]

_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure")}
"""Scheme of a URL to the package that reads it, and the extra of ours that installs it."""

_CONNECT_S = 10
_READ_S = 60
_TRIES = 3
_PARTS_AT_ONCE = 4
"""Parts of a file in memory during a transfer."""


def missing_package(address: StorageAddress) -> str | None:
    """Say which package a storage needs and this machine does not have; None if there is none."""
    package, extra = _EXTRAS.get(address.scheme, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return (
        f"{address.root} needs the package {package}, which is not installed here; "
        f"pip install 'zerolab[{extra}]'"
    )


def check_installed(address: StorageAddress) -> None:
    """Refuse a storage that this machine cannot open.

    Raises:
        ConfigError: If its package is not installed.
    """
    problem = missing_package(address)
    if problem:
        raise ConfigError("checkpoint storage", [problem])


def open_remote(address: StorageAddress) -> tuple[Any, str]:
    """Return an fsspec file system and the path of the root in it; nothing is asked of it yet.

    Raises:
        ConfigError: If its package is not installed.
    """
    check_installed(address)
    import fsspec

    # No instance is shared and nothing is remembered: others write and delete there, too.
    shared = {"skip_instance_cache": True, "use_listings_cache": False}
    found = fsspec.core.url_to_fs(address.root, **shared, **_arguments(address))
    return found[0], str(found[1]).rstrip("/")


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
    if address.scheme == "az" and options:  # else the machine's own, from its environment
        return _azure(options)
    return {}


def _azure(options: dict[str, str]) -> dict[str, Any]:
    if "connection_string" in options:
        return {"connection_string": options["connection_string"]}
    url = options.get("account_url", "")
    host, account = urlsplit(url).netloc, urlsplit(url).path.strip("/")
    if account and "credential" in options:  # as emulators and Azure Stack have it
        secret = options["credential"]
        kind = "SharedAccessSignature" if "sig=" in secret else "AccountKey"
        said = f"BlobEndpoint={url};AccountName={account};{kind}={secret}"
        return {"connection_string": said}
    return {
        "account_name": host.partition(".")[0],
        "account_host": host,
        "credential": options.get("credential"),
    }
