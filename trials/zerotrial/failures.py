"""What went wrong in a trial, in one line with the user's own file and line, and its exit code."""

import linecache
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path

from zerolab.contract.diagnosis import LESS_MEMORY, remedy_of
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
from zerolab.sizes import first_few
from zerotrial.ranks import is_peer_failure

__all__ = ["exit_code_of", "reason_of", "with_causes"]

_FAILED = 1

_OF_A_NETWORK = (
    UnreachableError, PeerFailedError, ConnectionError, TimeoutError, socket.gaierror
)  # fmt: skip
"""Of the server's, another rank's, a hub's that a model is fetched from: it may answer later."""

_MOST_LINES = 8
"""Of an exception's text: some list every tensor of a model."""


def exit_code_of(error: BaseException, *, building: bool) -> int:
    """The code that tells the platform whether starting again makes sense.

    Args:
        error: That ended the trial.
        building: Whether the trial was still being imported or built, which fails the same way
            each time; training may fail for reasons that pass.
    """
    if isinstance(error, StaleRunError):
        return EXIT_STALE
    if isinstance(error, InvalidHyperparametersError):
        return EXIT_INVALID_HP
    if is_storage_failure(error):
        return EXIT_INFRASTRUCTURE
    from_afar = any(isinstance(one, _OF_A_NETWORK) for one in with_causes(error))
    if from_afar or is_peer_failure(error):
        return _FAILED
    if isinstance(error, ZerolabError) or building:
        return EXIT_USER_ERROR
    return _FAILED


def reason_of(error: BaseException, model_dir: Path) -> str:
    """One message: where in the user's code, that line of it, and what.

    Args:
        error: That ended the trial.
        model_dir: The user's code.
    """
    text = "\n".join(first_few(str(error).strip().splitlines(), _MOST_LINES))
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ZerolabError):
        what = text or what
    place = _users_line(error, model_dir)
    if place is None:
        return what + _hints(error, model_dir)
    file, line, source = place
    if isinstance(error, SyntaxError):
        what = f"{type(error).__name__}: {error.msg}"
    where = f"{file}:{line}"
    told = f"{where}: {what} (in: {source})" if source else f"{where}: {what}"
    return told + _hints(error, model_dir)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came of, the newest first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


_NO_MEMORY = ("out of memory", "can't allocate memory")


def _hints(error: BaseException, model_dir: Path) -> str:
    """What was being done, as our notes say, and what helps where memory has run out."""
    hints = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(word in text for word in _NO_MEMORY):
        hints.append(LESS_MEMORY)
    known = isinstance(error, ImportError | RuntimeError | AssertionError | ValueError)
    remedy = remedy_of(str(error), model_dir=model_dir) if known else ""
    return "".join(f"; {hint}" for hint in hints) + remedy


def _users_line(error: BaseException, model_dir: Path) -> tuple[str, int, str] | None:
    """File (relative), line and source of the last frame in the user's code."""
    root = model_dir.resolve()
    if isinstance(error, SyntaxError) and error.filename and _inside(Path(error.filename), root):
        name = Path(error.filename).resolve().relative_to(root).as_posix()
        return name, error.lineno or 0, (error.text or "").strip()
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if _inside(path, root):
            source = linecache.getline(str(path), line).strip()
            return path.resolve().relative_to(root).as_posix(), line, source
    return None


def _inside(path: Path, root: Path) -> bool:
    try:
        relative = path.resolve().relative_to(root)
    except (ValueError, OSError):
        return False
    made = path.name.startswith("<")  # of no file, such as a dataclass's __init__
    return "site-packages" not in relative.parts and not made
