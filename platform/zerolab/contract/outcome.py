"""Outcome of a run: the exit code and a reason for the user."""

import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

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
from zerolab.registry import PARTS

__all__ = [
    "BEYOND_BOUND",
    "CHECKPOINTED_EXITS",
    "DELIBERATE_EXITS",
    "LESS_MEMORY",
    "OWN_PEER_PHRASES",
    "PEER_ERROR_PHRASES",
    "REACHED_BOUND",
    "Outcome",
    "failed_by_itself",
    "failed_by_peer",
    "first_failure",
    "is_failure",
    "read_outcome",
    "read_reason",
    "signal_text",
    "tail",
    "without_rank",
    "write_outcome",
    "write_reason",
]

DELIBERATE_EXITS = frozenset(
    {
        EXIT_USER_ERROR, EXIT_INVALID_HP, EXIT_PREEMPTED, EXIT_STALE, EXIT_INFRASTRUCTURE,
        EXIT_REACHED,
    }
)  # fmt: skip
"""Exit codes with a defined meaning; every other one but 0 is a crash."""

CHECKPOINTED_EXITS = frozenset({EXIT_PREEMPTED, EXIT_REACHED})
"""Exit codes of runs that have saved a checkpoint: every rank ends by itself."""

REACHED_BOUND = "trained up to its rung"
"""Reason of a run that paused at its searcher's bound."""

BEYOND_BOUND = "the script trains beyond"
"""Start of the reason of a run that trained beyond its bound."""

LESS_MEMORY = (
    "`zerolab plan` shows the memory of a rank; a higher ZeRO stage, offload_optimizer or a "
    "smaller micro-batch needs less"
)
"""Remedy for running out of memory."""

OWN_PEER_PHRASES = (
    "has exited (this is rank",
    "has exited or closed its engine",
    "connection to another rank broke",
    "the other ranks did not answer",
    "did not take part within",
    "has not called it within",
)
"""Phrases of our own errors; the code that raises them must have the same."""

PEER_ERROR_PHRASES = (
    "gloo",
    "NCCL",
    "Connection reset",
    "closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "TCPStore",
    "DistNetworkError",
    "DistStoreError",
    "ProcessGroup",
    *OWN_PEER_PHRASES,
)
"""Phrases in errors that the loss of another rank causes."""

_NO_FAILURE = CHECKPOINTED_EXITS | {0, EXIT_INVALID_HP, EXIT_STALE, EXIT_INFRASTRUCTURE}

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 1024
_REASON_CHARS = 500
_SEARCHED_LINES = 2000
"""Lines at the end of a rank's standard error that are searched for its last message."""
_RANK_PREFIX = re.compile(r"rank (\d+): ")
"""Prefix of a reason that another rank's failure caused."""
_RANK_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
"""Prefix of traceback lines once torch's process group is initialized."""
_BOX_CHARACTERS = " \t│╭╮╰╯─"
"""Characters of a box drawn by rich."""
_TORCH_EXIT_WARNING = re.compile(r"^\[rank\d+\]:\[[A-Z]\d{4} ")
"""Prefix of torch's warning about a process group that was not destroyed."""


class Outcome(msgspec.Struct, frozen=True):
    """Exit of a run's processes."""

    exit_code: int
    """0, a code of :mod:`zerolab.contract.spec`, another one of the user's, or -n for signal n."""
    reason: str | None = None
    """One line for the user, or None."""
    rank: int | None = None
    """The rank that decided it, if any."""
    was_stopped: bool = msgspec.field(default=False, name="told")
    """The launcher was stopped: the cause may be elsewhere."""


def write_reason(run_dir: Path | str, exit_code: int, reason: str, rank: int | None = None) -> None:
    """Write why this rank ends on purpose.

    The first rank's reason is kept, unless that rank only lost another one.

    Args:
        run_dir: ``RunSpec.run_dir``.
        exit_code: The code with which the process is about to exit.
        reason: One line for the user.
        rank: This rank, if there are several. The reason is prefixed with its name, or with the
            name of the rank whose failure it passes on (:meth:`zerolab.ranks.Ranks.together`).
    """
    if rank is not None and (passed_on := _RANK_PREFIX.match(reason)):
        rank = int(passed_on[1])
    elif rank is not None:
        reason = f"rank {rank}: {reason}"
    content = msgspec.json.encode({"exit_code": exit_code, "reason": reason, "rank": rank})
    path = RunFolder(Path(run_dir)).reason
    try:
        if not create_private(path, content) and not _names_lost_peer(reason):
            first = read_reason(path.parent)
            if first is not None and failed_by_peer(first):
                path.unlink(missing_ok=True)
                create_private(path, content)
    except OSError as error:  # perhaps a full disk: the exit code still shows the kind of end
        logger.warning("%s; the reason of this run's end is not saved: %s", error, reason)


def read_reason(run_dir: Path) -> Outcome | None:
    """Return the reason that a rank saved with :func:`write_reason`, or None."""
    saved = read_json(RunFolder(run_dir).reason)
    if saved is None or not isinstance(saved.get("exit_code"), int):
        return None
    rank = saved.get("rank")
    reason = str(saved["reason"]) if saved.get("reason") else None
    return Outcome(saved["exit_code"], reason, rank if isinstance(rank, int) else None)


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Save how the run ended, for the agent or the next launcher."""
    write_json(RunFolder(run_dir).exit, msgspec.to_builtins(outcome))


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return how the run ended, or None if its launcher died before it saved that."""
    saved = read_json(RunFolder(run_dir).exit)
    return None if saved is None else msgspec.convert(saved, Outcome)


def first_failure(run_dir: Path, rank: int, exit_code: int) -> Outcome:
    """Describe the rank that failed first.

    A rank killed by a signal is the cause, whatever reasons the others saved when they lost it.
    Otherwise a saved reason counts, unless it is of another rank that lost this one. Otherwise the
    rank's last line on standard error counts.

    Args:
        run_dir: Directory of the run.
        rank: The rank that failed first.
        exit_code: Its exit code; -n for signal n.
    """
    reported = read_reason(run_dir)
    if exit_code < 0 and (reported is None or reported.exit_code not in DELIBERATE_EXITS):
        return Outcome(exit_code, f"rank {rank} was killed by {signal_text(-exit_code)}", rank)
    lost_by_other = reported is not None and reported.rank != rank and failed_by_peer(reported)
    if reported is not None and not lost_by_other:
        return reported
    folder = RunFolder(run_dir)
    lines = tail(folder.stderr(rank), _SEARCHED_LINES).splitlines()
    last = _last_message(lines)[:_REASON_CHARS] or "it wrote nothing to standard error"
    try:
        spec = read_run_spec(folder.spec)
        model_dir, entrypoint = Path(spec.model_dir), spec.entrypoint
    except (OSError, msgspec.DecodeError):
        model_dir, entrypoint = folder.model, None
    diagnosis = PARTS.find("diagnosis")
    if diagnosis is not None:
        last = diagnosis.describe_failure(lines, last, model_dir, entrypoint)
    return Outcome(exit_code, f"rank {rank} exited with code {exit_code}: {last}", rank)


def without_rank(line: str) -> str:
    """Return a line of standard error without the rank that torch writes before it."""
    return _RANK_OF_TORCH.sub("", line)


def failed_by_itself(outcome: Outcome) -> bool:
    """Return whether a rank failed by its own error, not by a signal or another rank."""
    return _failed(outcome) and not failed_by_peer(outcome)


def failed_by_peer(outcome: Outcome) -> bool:
    """Return whether a rank failed because it lost another one."""
    return _failed(outcome) and _names_lost_peer(outcome.reason or "")


def _names_lost_peer(reason: str) -> bool:
    return any(phrase in reason for phrase in PEER_ERROR_PHRASES)


def _failed(outcome: Outcome) -> bool:
    return outcome.exit_code > 0 and outcome.exit_code not in DELIBERATE_EXITS


def is_failure(exit_code: int) -> bool:
    """Return whether a run with this exit code failed, by its own error or by a signal."""
    return exit_code not in _NO_FAILURE


def _last_message(lines: list[str]) -> str:
    """Return the last message, on one line.

    It starts at the last line that is not indented. Indented lines after it list an error's
    problems or torch's tensors.
    """
    parts: list[str] = []
    for line in reversed(list(_unboxed(lines))):
        text = without_rank(line)
        if _TORCH_EXIT_WARNING.match(line) or not text.strip():
            continue
        parts.append(text.strip())
        if not text[0].isspace():
            break
    return "; ".join(reversed(parts)).replace(":; ", ": ")


def _unboxed(lines: list[str]) -> Iterator[str]:
    """Yield lines, and each box that rich draws, as typer does around an error, as one of them."""
    box: list[str] | None = None
    for line in lines:
        if line.startswith("╭"):
            title = line.strip(_BOX_CHARACTERS)
            box = [f"{title}:" if title else ""]
        elif box is None:
            yield line
        elif line.startswith("╰"):
            yield " ".join(filter(None, box))
            box = None
        else:
            box.append(line.strip(_BOX_CHARACTERS))
    if box is not None:
        yield " ".join(filter(None, box))


def tail(path: Path, max_lines: int = 100) -> str:
    """Return the last lines of a text file, or an empty text if it is missing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return ""
    return "\n".join(content.decode(errors="replace").splitlines()[-max_lines:])


def signal_text(number: int) -> str:
    """Name a signal that killed a process, with the possible causes of a SIGKILL."""
    if number == signal.SIGKILL:
        causes = "memory ran out, or a user or a batch system killed it"
        return f"SIGKILL: {causes}. If memory ran out: {LESS_MEMORY}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
