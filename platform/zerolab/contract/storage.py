"""Address of a checkpoint storage, with the credentials that open it."""

from collections.abc import Iterator

import msgspec

from zerolab.contract.secret_text import MASK, is_secret_name

__all__ = ["StorageAddress"]


class StorageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, or a location in an object store with the options to open it."""

    root: str
    """A directory, or a URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container``."""
    options: dict[str, str] = {}
    """Keys of ``checkpoint_storage`` for the endpoint and the credentials."""

    def __repr__(self) -> str:
        """Omit the credentials: logs may show the text."""
        return f"StorageAddress({self.root!r})"

    __str__ = __repr__

    @property
    def is_remote(self) -> bool:
        """Return whether the root is a URL of an object store."""
        return "://" in self.root and not self.root.startswith("file://")

    @property
    def scheme(self) -> str:
        """Return the part before ``://``; empty for a directory."""
        return self.root.partition("://")[0] if self.is_remote else ""

    def at(self, name: str) -> str:
        """Return the path or URL of something directly below the root."""
        return f"{self.root.rstrip('/')}/{name}"

    def scrub(self, text: str) -> str:
        """Mask the secrets in a text, such as another library's error."""
        for secret in self._secrets():
            text = text.replace(secret, MASK)
        return text

    def _secrets(self) -> Iterator[str]:
        for name, value in self.options.items():
            if is_secret_name(name) and len(value) >= 4:
                yield value
            if name == "connection_string":
                parts = (part.partition("=")[2] for part in value.split(";"))
                yield from (part for part in parts if len(part) >= 16)
