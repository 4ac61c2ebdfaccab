"""Everything that Zerolab raises on purpose, in one tree.

A command turns a :class:`ZerolabError` into one message and exit code 2, a route into the HTTP
status of its class. Anything else that surfaces is a bug of ours and keeps its traceback.
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
    """Something the user can mend; its text says what and how."""


class ConfigError(ZerolabError, ValueError):
    """A file, a mapping or an argument that does not hold what it must.

    Args:
        source: Where the problems are, e.g. ``ds_config.json``.
        problems: One line each: ``key: what must hold, got value; what to do``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{source}: {len(self.problems)} problem(s){lines}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, list[str]]]:
        """Keep both parts when the error crosses a process boundary."""
        return type(self), (self.source, self.problems)


class NotFoundError(ZerolabError, LookupError):
    """There is no such experiment, trial, checkpoint or file."""


class ConflictError(ZerolabError):
    """The thing is not in a state in which this can be done."""


class StaleRunError(ConflictError):
    """Another run has taken this trial over; this one must stop and report nothing more."""


class ForbiddenError(ZerolabError):
    """The token is missing, unknown, or allows less than was asked."""


class UnreachableError(ZerolabError):
    """Nothing answers at the server's address."""


class TrialError(ZerolabError):
    """The user's trial class does something that the trial API rules out."""


class EngineError(ZerolabError):
    """A training loop or a model does something that the engine cannot take."""


class InvalidHyperparametersError(ZerolabError):
    """A trial declares its own hyperparameters impossible; it ends and is not restarted."""


class StorageError(ZerolabError):
    """The storage is full, read-only or gone: no fault of the trial, and it may pass."""


class PeerFailedError(ZerolabError):
    """Another rank has failed, and this one with it."""


def is_storage_failure(error: BaseException) -> bool:
    """Whether a disk that is full, read-only or broken is what an error comes from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StorageError):
            return True
        if isinstance(seen, OSError) and seen.errno in _STORAGE_ERRORS:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def one_line(error: BaseException) -> str:
    """Tell an error that someone else's code has raised: its class, and what it says first."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
