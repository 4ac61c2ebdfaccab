"""Why a script failed, from its standard error: the error, the user's file and line, a remedy."""

import re
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerolab.contract.spec import Command

__all__ = ["LESS_MEMORY", "describe_failure", "remedy_of", "without_rank"]

LESS_MEMORY = (
    "`zerolab plan` says what a rank needs; a higher ZeRO stage, offload_optimizer or a smaller "
    "micro-batch needs less"
)
"""What to do where memory has run out."""

_MODULES = {
    "deepspeed": "set `environment: {deepspeed: zerolab}`, with which this engine answers to it, "
    "or start it with `zerolab launch --as-deepspeed`",
    "determined": "docs/from_determined.md says what takes the place of each of its names",
}

_SHARDED = (
    "a method beside forward that begins with a parameter of the model itself needs, at ZeRO stage "
    '3, torch.distributed.fsdp.register_fsdp_forward_method(engine.module, "its name"), once'
)
"""Where a full tensor meets a parameter of which each rank has a part."""

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
_RANK_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
"""Before each line of a traceback in a process whose ranks have met."""
_OF_LAUNCHERS = (
    "subprocess.CalledProcessError",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "ChildFailedError",
)
"""Errors with which a launcher such as ``accelerate launch`` reports that of its script."""
_LATER_LINES = 20
"""Lines that other libraries may write after a traceback as the process exits."""


class _Traceback(NamedTuple):
    line: int
    """Index of the line with the error itself."""
    error: str
    frames: list[tuple[str, int, str]]
    """File, line number and source line, the innermost last."""
    launched: bool = False
    """A launcher reports this error of its script with one of its own."""


def without_rank(line: str) -> str:
    """Return a line of standard error without the rank that torch writes before it."""
    return _RANK_OF_TORCH.sub("", line)


def remedy_of(text: str, *, model_dir: Path | None = None, python: str = "") -> str:
    """Return ``; `` and what to do, for an error whose own message does not say it.

    Args:
        text: Message of the error.
        model_dir: The user's code.
        python: Interpreter that ran it; the calling one by default.
    """
    if "mixed torch.Tensor and DTensor" in text:
        return f"; {_SHARDED}"
    if any(words in text for words in _GPU_ERRORS):
        return f"; {_NO_GPU}"
    if re.search(r"num_samples should be a positive integer value, but got num_samples=0", text):
        return "; the data set is empty: check its path and filters"
    if "attempted relative import" in text and "no known parent package" in text:
        told = "the file is in no package: import it by its name, e.g. `from nets import Net`"
        return f"; {told} in place of `from .nets import Net`"
    missing = re.search(r"No module named '(\w+)", text)
    return f"; {_missing_module(missing[1], model_dir, python)}" if missing else ""


def _missing_module(name: str, model_dir: Path | None, python: str) -> str:
    """Say where a module is missing, and how to install it there."""
    if name in _MODULES:
        return _MODULES[name]
    import difflib

    files = model_dir.glob("*") if model_dir is not None and model_dir.is_dir() else ()
    own = [file.stem for file in files if file.suffix == ".py" or (file / "__init__.py").is_file()]
    python = python or sys.executable
    close = difflib.get_close_matches(name, own, n=1)
    meant = f"did you mean {close[0]!r} of the model directory? " if close else ""
    return (
        f"{meant}{python} on {socket.gethostname()} does not have it; install it there "
        f"(`{python} -m pip install ...`), or set environment.python to an interpreter that has it"
    )


def describe_failure(
    lines: Sequence[str], last_words: str, model_dir: Path, entrypoint: object = None
) -> str:
    """Describe the error that ended a script.

    Args:
        lines: The end of its standard error.
        last_words: What it wrote last; returned where there is no traceback.
        model_dir: The user's code, in which the line at fault is looked for first.
        entrypoint: What was run.

    Returns:
        E.g. ``train.py:12: ValueError: no data (in: load(path))``, and a remedy where there is one.
    """
    found = _last_traceback([without_rank(line) for line in lines])
    told, python = last_words, _python_of(entrypoint)
    if found is not None:
        at, source = _place(found.frames, model_dir)
        error = f"{at}{found.error}{source}"
        if last_words.startswith(found.error.rstrip(":")[:80]):
            told = f"{at}{last_words}{source}"
        else:
            told = error if found.launched else f"{last_words}; the last traceback: {error}"
    return told + remedy_of(told, model_dir=model_dir, python=python)


def _python_of(entrypoint: object) -> str:
    """The interpreter that a command names first; empty where it names none."""
    if not isinstance(entrypoint, Command) or "python" not in Path(entrypoint.words[0]).name:
        return ""
    return shutil.which(entrypoint.words[0]) or ""


def _last_traceback(lines: Sequence[str]) -> _Traceback | None:
    """Find the last traceback, unless too much was written after it."""
    found = [_traceback_at(lines, i) for i, line in enumerate(lines) if _BEGIN.match(line)]
    known = [one for one in found if one is not None]
    of_scripts = [one for one in known if not one.error.startswith(_OF_LAUNCHERS)]
    if not known:
        return _syntax_error(lines) or _boxed(lines)
    if of_scripts and known[-1] is not of_scripts[-1]:
        return of_scripts[-1]._replace(launched=True)
    return known[-1] if len(lines) - known[-1].line <= _LATER_LINES else None


def _traceback_at(lines: Sequence[str], start: int) -> _Traceback | None:
    frames: list[tuple[str, int, str]] = []
    at = start + 1
    while at < len(lines) and (not lines[at].strip() or lines[at][0].isspace()):
        _add_frame(lines, at, frames)
        at += 1
    return _Traceback(at, lines[at].strip(), frames) if at < len(lines) else None


def _add_frame(lines: Sequence[str], at: int, frames: list[tuple[str, int, str]]) -> None:
    frame = _FRAME.match(lines[at])
    if frame:
        after = lines[at + 1].strip() if at + 1 < len(lines) else ""
        source = "" if after.startswith(("File ", "^", "~")) or not after else after
        frames.append((frame[1], int(frame[2]), source))


def _syntax_error(lines: Sequence[str]) -> _Traceback | None:
    """Find the error of a script that Python cannot read, which has no traceback."""
    for at in range(len(lines) - 1, 0, -1):
        if re.match(r"(SyntaxError|IndentationError|TabError): ", lines[at]):
            frames: list[tuple[str, int, str]] = []
            for above in range(max(0, at - 5), at):
                _add_frame(lines, above, frames)
            return _Traceback(at, lines[at].strip(), frames)
    return None


def _boxed(lines: Sequence[str]) -> _Traceback | None:
    """Find a traceback that rich has drawn."""
    found = [(i, match) for i, line in enumerate(lines) if (match := _RICH_FRAME.match(line))]
    ends = [i for i, line in enumerate(lines) if line.startswith("╰")]
    if not found or not ends or ends[-1] + 1 >= len(lines):
        return None
    at = ends[-1] + 1
    return _Traceback(at, lines[at].strip(), [(m[1], int(m[2]), "") for _, m in found])


def _place(frames: Sequence[tuple[str, int, str]], model_dir: Path) -> tuple[str, str]:
    """File and line in the user's code, as ``train.py:12: ``, and the source line."""
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
