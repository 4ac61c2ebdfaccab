"""Diagnosis of a failed script: the error, the user's file and line, and a remedy."""

import re
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerolab.contract.outcome import without_rank
from zerolab.contract.spec import Command

__all__ = ["describe_failure", "remedy_of"]

_MODULES = {
    "deepspeed": "set `environment: {deepspeed: zerolab}`, with which this engine answers to it, "
    "or start it with `zerolab launch --as-deepspeed`",
    "determined": "docs/migrate/from_determined.md lists the replacement of each of its names",
}

_SHARDED = (
    "a method beside forward that begins with a parameter of the model itself needs, at ZeRO stage "
    '3, torch.distributed.fsdp.register_fsdp_forward_method(engine.module, "its name"), once'
)
"""Remedy for mixing a full tensor with a sharded parameter."""

_NO_GPU = (
    "this process has no such GPU: use context.to_device(batch) and context.device in a trial "
    'class, torch.device("cuda" if torch.cuda.is_available() else "cpu") in a script, or a GPU slot'
)
_GPU_ERRORS = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "no CUDA-capable device is detected",
    "invalid device ordinal",
    "Attempting to deserialize object on a CUDA device",
)

_FRAME = re.compile(r'\s+File "([^"<]+)", line (\d+)')
_RICH_FRAME = re.compile(r"^│\s+(/\S+\.py):(\d+) in ")
_BEGIN = re.compile(r"^(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_LAUNCHER_ERRORS = (
    "subprocess.CalledProcessError",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "ChildFailedError",
)
"""Errors with which a launcher such as ``accelerate launch`` reports an error of its script."""
_LATER_LINES = 20
"""Lines that other libraries may write after a traceback as the process exits."""


class _Traceback(NamedTuple):
    line: int
    """Index of the line with the error itself."""
    error: str
    frames: list[tuple[str, int, str]]
    """File, line number and source line, the innermost last."""
    launched: bool = False
    """A launcher reports this error of its script with another error."""


def remedy_of(text: str, *, model_dir: Path | None = None, python: str = "") -> str:
    """Return ``; `` and a remedy, for an error whose message has none.

    Args:
        text: Message of the error.
        model_dir: The user's code.
        python: Interpreter that ran the code; the calling one by default.
    """
    if "mixed torch.Tensor and DTensor" in text:
        return f"; {_SHARDED}"
    if any(phrase in text for phrase in _GPU_ERRORS):
        return f"; {_NO_GPU}"
    if re.search(r"num_samples should be a positive integer value, but got num_samples=0", text):
        return "; the data set is empty: check its path and filters"
    if "attempted relative import" in text and "no known parent package" in text:
        hint = "the file is in no package: import it by its name, e.g. `from nets import Net`"
        return f"; {hint} instead of `from .nets import Net`"
    missing = re.search(r"No module named '(\w+)", text)
    return f"; {_missing_module(missing[1], model_dir, python)}" if missing else ""


def _missing_module(name: str, model_dir: Path | None, python: str) -> str:
    """Return how to install a missing module, and on which machine."""
    if name in _MODULES:
        return _MODULES[name]
    import difflib

    files = model_dir.glob("*") if model_dir is not None and model_dir.is_dir() else ()
    local_modules = [
        file.stem for file in files if file.suffix == ".py" or (file / "__init__.py").is_file()
    ]
    python = python or sys.executable
    close = difflib.get_close_matches(name, local_modules, n=1)
    suggestion = f"did you mean {close[0]!r} of the model directory? " if close else ""
    return (
        f"{suggestion}{python} on {socket.gethostname()} does not have it; install it there "
        f"(`{python} -m pip install ...`), or set environment.python to an interpreter that has it"
    )


def describe_failure(
    lines: Sequence[str], last_message: str, model_dir: Path, entrypoint: object = None
) -> str:
    """Describe the error that ended a script.

    Args:
        lines: The end of its standard error.
        last_message: Its last message; returned if there is no traceback.
        model_dir: The user's code, searched first for the line at fault.
        entrypoint: The command or trial class that ran.

    Returns:
        E.g. ``train.py:12: ValueError: no data (in: load(path))``, and a remedy if one is known.
    """
    traceback = _last_traceback([without_rank(line) for line in lines])
    description, python = last_message, _interpreter_of(entrypoint)
    if traceback is not None:
        location, source = _location(traceback.frames, model_dir)
        error = f"{location}{traceback.error}{source}"
        if last_message.startswith(traceback.error.rstrip(":")[:80]):
            description = f"{location}{last_message}{source}"
        else:
            description = (
                error if traceback.launched else f"{last_message}; the last traceback: {error}"
            )
    return description + remedy_of(description, model_dir=model_dir, python=python)


def _interpreter_of(entrypoint: object) -> str:
    """Return the interpreter that a command starts, or an empty text."""
    if not isinstance(entrypoint, Command) or "python" not in Path(entrypoint.words[0]).name:
        return ""
    return shutil.which(entrypoint.words[0]) or ""


def _last_traceback(lines: Sequence[str]) -> _Traceback | None:
    """Find the last traceback, unless many lines follow it."""
    candidates = [_traceback_at(lines, i) for i, line in enumerate(lines) if _BEGIN.match(line)]
    tracebacks = [traceback for traceback in candidates if traceback is not None]
    script_errors = [
        traceback for traceback in tracebacks if not traceback.error.startswith(_LAUNCHER_ERRORS)
    ]
    if not tracebacks:
        return _syntax_error(lines) or _rich_traceback(lines)
    if script_errors and tracebacks[-1] is not script_errors[-1]:
        return script_errors[-1]._replace(launched=True)
    return tracebacks[-1] if len(lines) - tracebacks[-1].line <= _LATER_LINES else None


def _traceback_at(lines: Sequence[str], start: int) -> _Traceback | None:
    frames: list[tuple[str, int, str]] = []
    index = start + 1
    while index < len(lines) and (not lines[index].strip() or lines[index][0].isspace()):
        _add_frame(lines, index, frames)
        index += 1
    return _Traceback(index, lines[index].strip(), frames) if index < len(lines) else None


def _add_frame(lines: Sequence[str], index: int, frames: list[tuple[str, int, str]]) -> None:
    frame = _FRAME.match(lines[index])
    if frame:
        after = lines[index + 1].strip() if index + 1 < len(lines) else ""
        source = "" if after.startswith(("File ", "^", "~")) or not after else after
        frames.append((frame[1], int(frame[2]), source))


def _syntax_error(lines: Sequence[str]) -> _Traceback | None:
    """Find the error of a script that Python cannot read, which has no traceback."""
    for index in range(len(lines) - 1, 0, -1):
        if re.match(r"(SyntaxError|IndentationError|TabError): ", lines[index]):
            frames: list[tuple[str, int, str]] = []
            for above in range(max(0, index - 5), index):
                _add_frame(lines, above, frames)
            return _Traceback(index, lines[index].strip(), frames)
    return None


def _rich_traceback(lines: Sequence[str]) -> _Traceback | None:
    """Find a traceback in a box drawn by rich."""
    frames = [(i, match) for i, line in enumerate(lines) if (match := _RICH_FRAME.match(line))]
    ends = [i for i, line in enumerate(lines) if line.startswith("╰")]
    if not frames or not ends or ends[-1] + 1 >= len(lines):
        return None
    index = ends[-1] + 1
    return _Traceback(index, lines[index].strip(), [(m[1], int(m[2]), "") for _, m in frames])


def _location(frames: Sequence[tuple[str, int, str]], model_dir: Path) -> tuple[str, str]:
    """Return file and line in the user's code, as ``train.py:12: ``, and the source line."""
    root = model_dir.resolve()
    outside = [frame for frame in frames if not _is_library(frame[0])]
    inside = [
        frame
        for frame in frames
        if Path(frame[0]).resolve().is_relative_to(root) and "site-packages" not in frame[0]
    ]
    for file, line, source in reversed(inside or outside):
        path = Path(file).resolve()
        name = path.relative_to(root).as_posix() if inside else file
        return f"{name}:{line}: ", f" (in: {source})" if source else ""
    return "", ""


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts or not Path(file).suffix:
        return True
    standard = Path(socket.__file__).parent  # of this Python; another one has the same layout
    in_lib = any(re.fullmatch(r"python3\.\d+", part) for part in parts[:-1]) and "lib" in parts
    return in_lib or Path(file).is_relative_to(standard)
