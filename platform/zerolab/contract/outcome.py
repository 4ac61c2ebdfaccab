"""How a run ended: the exit code, and one line for the user."""

import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from zerolab.contract.diagnosis import LESS_MEMORY, describe_failure, without_rank
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_STALE,
    EXIT_USER_ERROR,
    read_run_spec,
)
from zerolab.files import create_private, read_json, write_json

__all__ = [
    "BEYOND_BOUND",
    "DELIBERATE",
    "LEAVING",
    "REACHED_BOUND",
    "Outcome",
    "failure",
    "is_failure",
    "read_outcome",
    "read_reason",
    "signal_text",
    "tail",
    "write_outcome",
    "write_reason",
]

DELIBERATE = frozenset(
    {
        EXIT_USER_ERROR, EXIT_INVALID_HP, EXIT_PREEMPTED, EXIT_STALE, EXIT_INFRASTRUCTURE,
        EXIT_REACHED,
    }
)  # fmt: skip
"""Exit codes with which a rank says something; every other one but 0 is a crash."""

LEAVING = frozenset({EXIT_PREEMPTED, EXIT_REACHED})
"""Exit codes of runs that have saved a checkpoint: every rank ends by itself."""

REACHED_BOUND = "trained as far as the searcher let it"
"""Reason of a run that paused where its searcher said."""

BEYOND_BOUND = "the script trains beyond"
"""How the reason begins of a run that did not stop there."""

_NO_FAILURE = LEAVING | {0, EXIT_INVALID_HP, EXIT_STALE, EXIT_INFRASTRUCTURE}

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 1024
_REASON_CHARS = 500
_LONGEST_TEXT = 2000
"""Lines at the end of a rank's standard error in which its last words are looked for."""
_OF_A_RANK = re.compile(r"rank (\d+): ")
"""What a rank says of another one's failure begins so."""
_FRAME = " \t│╭╮╰╯─"
"""What rich draws a box of."""
_OF_TORCH_AT_EXIT = re.compile(r"^\[rank\d+\]:\[[A-Z]\d{4} ")
"""Written after a traceback: that a process group has not been destroyed."""


class Outcome(msgspec.Struct, frozen=True):
    """How the processes of a run ended."""

    exit_code: int
    """0, a code of :mod:`zerolab.contract.spec`, another one of the user's, or -n for signal n."""
    reason: str | None = None
    """One line for the user; None when there is nothing to say."""
    rank: int | None = None
    """The rank that decided it, where it was one."""
    told: bool = False
    """The launcher was told to stop: the cause may be elsewhere."""


def write_reason(run_dir: Path | str, exit_code: int, reason: str, rank: int | None = None) -> None:
    """Say why this rank ends on purpose; of several ranks, the first one is believed.

    Args:
        run_dir: ``RunSpec.run_dir``.
        exit_code: The code with which the process is about to exit.
        reason: One line for the user.
        rank: Which rank says so, where there are several; its name stands before the reason, or
            that of the one whose failure it only passes on (:meth:`zerolab.ranks.Ranks.together`).
    """
    if rank is not None and (passed_on := _OF_A_RANK.match(reason)):
        rank = int(passed_on[1])
    elif rank is not None:
        reason = f"rank {rank}: {reason}"
    content = msgspec.json.encode({"exit_code": exit_code, "reason": reason, "rank": rank})
    try:
        create_private(RunFolder(Path(run_dir)).reason, content)
    except OSError as error:  # a full disk, maybe: the exit code says as much as it can
        logger.warning("%s; why this run ends is not written down: %s", error, reason)


def read_reason(run_dir: Path) -> Outcome | None:
    """Return what a rank said with :func:`write_reason`, if one did."""
    said = read_json(RunFolder(run_dir).reason)
    if said is None or not isinstance(said.get("exit_code"), int):
        return None
    rank = said.get("rank")
    reason = str(said["reason"]) if said.get("reason") else None
    return Outcome(said["exit_code"], reason, rank if isinstance(rank, int) else None)


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Keep how the run ended, for the agent, or for the next one."""
    write_json(RunFolder(run_dir).exit, msgspec.to_builtins(outcome))


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return how the run ended, or None when its launcher did not live to say."""
    found = read_json(RunFolder(run_dir).exit)
    return None if found is None else msgspec.convert(found, Outcome)


def failure(run_dir: Path, rank: int, exit_code: int) -> Outcome:
    """Describe the rank that failed first.

    A rank that was killed by a signal is the cause, whatever the others said as they lost it;
    else what a rank said on purpose counts, and else its last line on standard error.

    Args:
        run_dir: Directory of the run.
        rank: That failed first.
        exit_code: Its own; -n for signal n.
    """
    said = read_reason(run_dir)
    if exit_code < 0 and (said is None or said.exit_code not in DELIBERATE):
        return Outcome(exit_code, f"rank {rank} was killed by {signal_text(-exit_code)}", rank)
    if said is not None:
        return said
    folder = RunFolder(run_dir)
    lines = tail(folder.stderr(rank), _LONGEST_TEXT).splitlines()
    last = _last_words(lines)[:_REASON_CHARS] or "it wrote nothing to standard error"
    try:
        spec = read_run_spec(folder.spec)
        model_dir, entrypoint = Path(spec.model_dir), spec.entrypoint
    except (OSError, msgspec.DecodeError):
        model_dir, entrypoint = folder.model, None
    told = describe_failure(lines, last, model_dir, entrypoint)
    return Outcome(exit_code, f"rank {rank} exited with code {exit_code}: {told}", rank)


def is_failure(exit_code: int) -> bool:
    """Return whether a run with this exit code failed, by its own error or by a signal."""
    return exit_code not in _NO_FAILURE


def _last_words(lines: list[str]) -> str:
    """What was said last, on one line: from the line that is not indented on.

    What follows that line is the problems of an error, or the tensors that torch lists.
    """
    words: list[str] = []
    for line in reversed(list(_unboxed(lines))):
        said = without_rank(line)
        if _OF_TORCH_AT_EXIT.match(line) or not said.strip():
            continue
        words.append(said.strip())
        if not said[0].isspace():
            break
    return "; ".join(reversed(words)).replace(":; ", ": ")


def _unboxed(lines: list[str]) -> Iterator[str]:
    """Yield lines, and each box that rich draws, as typer does around an error, as one of them."""
    box: list[str] | None = None
    for line in lines:
        if line.startswith("╭"):
            title = line.strip(_FRAME)
            box = [f"{title}:" if title else ""]
        elif box is None:
            yield line
        elif line.startswith("╰"):
            yield " ".join(filter(None, box))
            box = None
        else:
            box.append(line.strip(_FRAME))
    if box is not None:
        yield " ".join(filter(None, box))


def tail(path: Path, max_lines: int = 100) -> str:
    """Return the last lines of a text file; empty when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return ""
    return "\n".join(content.decode(errors="replace").splitlines()[-max_lines:])


def signal_text(number: int) -> str:
    """Name a signal that has killed a process, and say what helps where memory has run out."""
    if number == signal.SIGKILL:
        return f"SIGKILL, as the system does when memory has run out: {LESS_MEMORY}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
