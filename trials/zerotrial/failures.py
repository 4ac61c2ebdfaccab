"""Failures of a trial: exit code, and a one-line reason with the user's file and line."""

import linecache
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path

from zerolab.contract.outcome import LESS_MEMORY
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_STALE,
    EXIT_USER_ERROR,
)
from zerolab.errors import (
    InvalidHyperparametersError,
    PeerFailedError,
    StaleRunError,
    UnreachableError,
    ZerolabError,
    is_storage_failure,
)
from zerolab.formatting import first_few
from zerolab.registry import PARTS
from zerotrial.ranks import is_peer_failure

__all__ = ["exit_code_of", "reason_of", "with_causes"]

_EXIT_FAILED = 1

_NETWORK_ERRORS = (
    UnreachableError, PeerFailedError, ConnectionError, TimeoutError, socket.gaierror
)  # fmt: skip
"""Errors of connections to the server, another rank or a model hub; a retry may succeed."""

_MAX_LINES = 8
"""Maximum lines of an exception's text; some list every tensor of a model."""


def exit_code_of(error: BaseException, *, building: bool) -> int:
    """Return the exit code, by which the platform decides whether to restart the trial.

    Args:
        error: Error that ended the trial.
        building: Whether the trial was being imported or built. Such failures are permanent;
            failures of training may be temporary.
    """
    if isinstance(error, StaleRunError):
        return EXIT_STALE
    if isinstance(error, InvalidHyperparametersError):
        return EXIT_INVALID_HP
    if is_storage_failure(error):
        return EXIT_INFRASTRUCTURE
    network_failed = any(isinstance(cause, _NETWORK_ERRORS) for cause in with_causes(error))
    if network_failed or is_peer_failure(error):
        return _EXIT_FAILED
    if isinstance(error, ZerolabError) or building:
        return EXIT_USER_ERROR
    return _EXIT_FAILED


def reason_of(error: BaseException, model_dir: Path) -> str:
    """Return a message with the error and the user's file, line and source.

    Args:
        error: Error that ended the trial.
        model_dir: Directory of the user's code.
    """
    text = "\n".join(first_few(str(error).strip().splitlines(), _MAX_LINES))
    description = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ZerolabError):
        description = text or description
    frame_info = _user_frame(error, model_dir)
    if frame_info is None:
        return description + _hints(error, model_dir)
    file, line, source = frame_info
    if isinstance(error, SyntaxError):
        description = f"{type(error).__name__}: {error.msg}"
    position = f"{file}:{line}"
    message = (
        f"{position}: {description} (in: {source})" if source else f"{position}: {description}"
    )
    return message + _hints(error, model_dir)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the newest first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory")


def _hints(error: BaseException, model_dir: Path) -> str:
    """Return the notes of an error and a remedy, each after a semicolon."""
    hints = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_MEMORY_TEXTS):
        hints.append(LESS_MEMORY)
    explainable = isinstance(error, ImportError | RuntimeError | AssertionError | ValueError)
    diagnosis = PARTS.find("diagnosis") if explainable else None
    remedy = diagnosis.remedy_of(str(error), model_dir=model_dir) if diagnosis else ""
    return "".join(f"; {hint}" for hint in hints) + remedy


def _user_frame(error: BaseException, model_dir: Path) -> tuple[str, int, str] | None:
    """Return relative file, line and source of the last frame in the user's code."""
    root = model_dir.resolve()
    if (
        isinstance(error, SyntaxError)
        and error.filename
        and _is_user_code(Path(error.filename), root)
    ):
        name = Path(error.filename).resolve().relative_to(root).as_posix()
        return name, error.lineno or 0, (error.text or "").strip()
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if _is_user_code(path, root):
            source = linecache.getline(str(path), line).strip()
            return path.resolve().relative_to(root).as_posix(), line, source
    return None


def _is_user_code(path: Path, root: Path) -> bool:
    try:
        relative = path.resolve().relative_to(root)
    except (ValueError, OSError):
        return False
    generated = path.name.startswith("<")  # no file, such as a dataclass's __init__
    return "site-packages" not in relative.parts and not generated
