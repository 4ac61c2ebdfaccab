"""Where a run's checkpoints lie, and the secrets that open it, which no answer and no log shows."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

__all__ = ["MASK", "SECRETS", "StorageAddress", "hide_secrets"]

SECRETS = ("access_key", "secret_key", "connection_string", "credential")
"""Keys of ``checkpoint_storage`` whose values nobody is shown."""

MASK = "********"
"""Stands for them in answers."""


class StorageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, or a place in an object store and how to open it."""

    root: str
    """A directory, or a URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container``."""
    options: dict[str, str] = {}
    """Keys of ``checkpoint_storage`` that say how to open it: endpoint and credentials."""

    def __repr__(self) -> str:
        """Leave the credentials out: this may end in a log."""
        return f"StorageAddress({self.root!r})"

    __str__ = __repr__

    @property
    def is_remote(self) -> bool:
        """Whether it is no directory of a file system."""
        return "://" in self.root and not self.root.startswith("file://")

    @property
    def scheme(self) -> str:
        """What stands before ``://``; empty for a directory."""
        return self.root.partition("://")[0] if self.is_remote else ""

    def at(self, name: str) -> str:
        """Return the path or URL of something directly below the root."""
        return f"{self.root.rstrip('/')}/{name}"

    def scrub(self, text: str) -> str:
        """Take the secrets out of a text, such as another library's error."""
        for secret in self._secrets():
            text = text.replace(secret, MASK)
        return text

    def _secrets(self) -> Iterator[str]:
        for name in SECRETS:
            value = self.options.get(name, "")
            if len(value) >= 4:
                yield value
            if name == "connection_string":
                parts = (part.partition("=")[2] for part in value.split(";"))
                yield from (part for part in parts if len(part) >= 16)


def hide_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an experiment's configuration with :data:`MASK` in place of its storage's secrets."""
    storage = config.get("checkpoint_storage")
    if not isinstance(storage, Mapping):
        return dict(config)
    hidden = {
        key: MASK if key in SECRETS and value is not None else value
        for key, value in storage.items()
    }
    return {**config, "checkpoint_storage": hidden}
