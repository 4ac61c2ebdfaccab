"""File of ``--oidc``: the provider, and which of its users may sign in."""

import importlib.util
import re
import stat
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError
from zeroserver.access.routes import Role

__all__ = ["SIGN_IN_S", "OidcSettings", "read_oidc_settings"]

SIGN_IN_S = 600
"""Time in which a user must sign in at the provider, in seconds."""

_MAX_BYTES = 64 * 1024
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class OidcSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Provider and users of the sign-in."""

    issuer: str
    """URL of the provider, as in its discovery document."""
    client_id: str
    client_secret: str
    label: str = "single sign-on"
    """Name of the provider on the page's button."""
    user_claim: str = "email"
    """Claim with the name of the Zerolab user; ``email`` must be verified by the provider."""
    new_users: Role | None = None
    """Role of users that the first sign-in creates; None: only existing users may sign in."""
    scopes: tuple[str, ...] = ("openid", "email", "profile")


def read_oidc_settings(path: Path) -> OidcSettings:
    """Read the file.

    Args:
        path: YAML file that only its owner can read, since it contains the client's secret.

    Raises:
        ConfigError: With all problems of the file.
    """
    if importlib.util.find_spec("joserfc") is None:
        raise _error(path, ["needs joserfc; run `pip install 'zerolab[oidc]'`"])
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise _error(path, ["must be a file of at most 64 KiB"])
        if status.st_mode & 0o077:
            raise _error(path, ["others can read it, and it has a secret; do `chmod 600` on it"])
    except OSError as error:
        raise _error(path, [f"cannot be read: {error}"]) from error
    try:
        content = read_yaml(path)
    except ConfigError as error:  # its message could show the secret
        place = re.search(r"line \d+(, column \d+)?", str(error))
        problem = f"must be YAML; the mistake is in {place[0] if place else 'the file'}"
        raise _error(path, [problem]) from None
    problems = list(_problems(content))
    if problems:
        raise _error(path, problems)
    return msgspec.convert(content, OidcSettings)


def _error(path: Path, problems: list[str]) -> ConfigError:
    return ConfigError(f"--oidc {path}", problems)


def _problems(content: dict[Any, Any]) -> list[str]:
    """Find all problems; messages never show the secret."""
    fields = {field.name: field for field in msgspec.structs.fields(OidcSettings)}
    problems = [
        f"{key}: unknown key; the keys are {', '.join(fields)}"
        for key in content
        if key not in fields
    ]
    for name, field in fields.items():
        value = content.get(name)
        if value is None:
            if field.required:
                problems.append(f"{name}: missing; the provider shows it for its client")
        elif name == "scopes":
            if not isinstance(value, list) or "openid" not in value or not _are_texts(value):
                problems.append("scopes: must be a list of names with openid")
        elif name == "new_users":
            if value not in get_args(Role):
                problems.append(f"new_users: must be viewer, member or admin, got {value!r}")
        elif not isinstance(value, str) or not value.strip():
            problems.append(f"{name}: must be a text that is not empty")
        elif name == "issuer" and not _is_safe(value):
            problems.append(f"issuer: must be a https:// URL, got {value[:200]!r}")
    return problems


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _is_safe(url: str) -> bool:
    """Check that the connection is encrypted, or stays on this machine."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (
            parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        )
    except ValueError:
        return False
