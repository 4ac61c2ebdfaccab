"""Exceptions that Zerolab raises on purpose.

A command turns a :class:`ZerolabError` into one message and exit code 2, a route into the HTTP
status of its class. Any other exception is a bug of Zerolab and keeps its traceback.
"""

import errno
from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "ConflictError",
    "EngineError",
    "ForbiddenError",
    "InvalidHyperparametersError",
    "NotFoundError",
    "PeerFailedError",
    "StaleRunError",
    "StorageError",
    "TrialError",
    "UnreachableError",
    "ZerolabError",
    "is_storage_failure",
    "one_line",
]

_STORAGE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG}
)


class ZerolabError(Exception):
    """Base class of errors that the user can fix; the message contains the remedy."""


class ConfigError(ZerolabError, ValueError):
    """Invalid content of a file, a mapping or an argument.

    Args:
        source: Source of the problems, e.g. ``ds_config.json``.
        problems: One line each: ``key: what must hold, got value; what to do``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{source}: {len(self.problems)} problem(s){lines}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, list[str]]]:
        """Pickle both parts."""
        return type(self), (self.source, self.problems)


class NotFoundError(ZerolabError, LookupError):
    """Unknown experiment, trial, checkpoint or file."""


class ConflictError(ZerolabError):
    """The current state does not allow the operation."""


class StaleRunError(ConflictError):
    """Another run has taken this trial over; this one must stop and report nothing more."""


class ForbiddenError(ZerolabError):
    """The token is missing, unknown, or does not allow the request."""


class UnreachableError(ZerolabError):
    """The server does not respond at its address."""


class TrialError(ZerolabError):
    """The user's trial class violates the trial API."""


class EngineError(ZerolabError):
    """A training loop or a model does something that the engine does not support."""


class InvalidHyperparametersError(ZerolabError):
    """A trial declared its hyperparameters invalid; it ends and is not restarted."""


class StorageError(ZerolabError):
    """The storage is full, read-only or unavailable: not the trial's fault, perhaps temporary."""


class PeerFailedError(ZerolabError):
    """Another rank has failed, and this one with it."""


def is_storage_failure(error: BaseException) -> bool:
    """Return whether an error comes from a full, read-only or broken disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StorageError):
            return True
        if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRORS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def one_line(error: BaseException) -> str:
    """Describe an exception of other code: its class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
