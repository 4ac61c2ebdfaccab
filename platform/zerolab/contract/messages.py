"""What travels between a run, its agent and the server, as msgspec types.

Both ends import this one module. A batch is a struct here and a map on the wire, so JSON and
MessagePack carry the same thing; every time is in seconds since 1970 (UTC, float). MessagePack
carries numbers that are not finite by itself; JSON cannot, so there they travel as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (:func:`wire_number`, :func:`plain_number`).
"""

import math
from typing import Any, Literal

import msgspec

from zerolab.contract.names import DEFAULT_POOL
from zerolab.contract.spec import RunSpec

__all__ = [
    "JSON",
    "KILL_GRACE_S",
    "LEAVE_GRACE_S",
    "MSGPACK",
    "AgentLeave",
    "AgentRegistration",
    "AgentWork",
    "Bound",
    "CheckpointRecord",
    "Directive",
    "Extension",
    "LogBatch",
    "LogEntry",
    "Meeting",
    "MetricsRecord",
    "ProgressRecord",
    "Record",
    "ReportBatch",
    "RunActivity",
    "RunExit",
    "SlotInfo",
    "StateRecord",
    "Stored",
    "WorkItem",
    "plain_number",
    "wire_number",
]

JSON = "application/json"
MSGPACK = "application/x-msgpack"

KILL_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL, in seconds, of a run that is killed."""
LEAVE_GRACE_S = 30.0
"""The same of one that was to save and leave, and does not ask whether it is."""


class MetricsRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="metrics"):
    """Named numbers of one group at one point of the training."""

    group: str
    """``training``, ``validation`` or ``system``."""
    steps: int
    """Batches (optimizer steps) completed; at least 0."""
    values: dict[str, float | str]
    """Name to number. Validation metrics carry ``epochs`` too, for searchers that count in them."""
    time: float


class ProgressRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="progress"):
    """How far the trial is, 0 to 1."""

    value: float
    time: float


class StateRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """What the run is doing: ``starting``, ``training``, ``validating``, ``checkpointing``."""

    state: str
    time: float


class CheckpointRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """A checkpoint that is complete in the storage."""

    uuid: str
    steps_completed: int
    resources: dict[str, int]
    """Path inside the checkpoint to its size in bytes."""
    metadata: dict[str, Any]
    time: float


Record = MetricsRecord | ProgressRecord | StateRecord | CheckpointRecord


class ReportBatch(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/reports``: records in order, numbered from 1 in each run."""

    first: int
    """Number of the first record in ``records``."""
    records: list[Record]


class LogEntry(msgspec.Struct, frozen=True):
    """One line that a rank, or the agent about it, wrote."""

    text: str
    time: float
    rank: int | None = None
    stream: Literal["stdout", "stderr", "agent", "server"] = "stdout"
    level: str | None = None
    """``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL`` where it is known."""


class LogBatch(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/logs``: entries in order, numbered from 0 in each run."""

    first: int
    entries: list[LogEntry]
    node: int = 0
    """Node rank of the agent, of a run that has several: each numbers its own."""


class Stored(msgspec.Struct, frozen=True):
    """Answer to a batch.

    For reports, the number of the last record that is stored (0 for none); for logs, the number
    of the next entry that the server waits for.
    """

    stored: int


class Bound(msgspec.Struct, frozen=True):
    """What a run says that has trained as far as its searcher let it."""

    until: int
    """Its bound, in the unit of the search."""


class Extension(msgspec.Struct, frozen=True):
    """Whether a run may go on beyond its bound, rather than give its slots back."""

    goes_on: bool
    until: int | None = None
    """The next bound, in the unit of the search; None when it may train to its length."""


class Directive(msgspec.Struct, frozen=True):
    """What a run shall do now: go on, or checkpoint and exit with code 66."""

    action: Literal["train", "preempt", "stop"]
    version: int
    """To be sent back as ``version`` with the next question, which then waits for a change."""
    deadline_s: float | None = None
    """Seconds that are left for it, counted from now; None when there is no limit."""


class SlotInfo(msgspec.Struct, frozen=True):
    """A device that an agent offers."""

    id: int
    device: str
    """``cpu``, or ``cuda:0 NAME``."""
    node: int | None = None
    """Number of the node on which it is, where the agent offers those of a cluster; None on the
    agent's own machine."""
    down: bool = False
    """The cluster has a node too few for it now. Only how many nodes are down counts: which slots
    that closes is said by the server, which knows what runs hold."""


class AgentRegistration(msgspec.Struct, frozen=True):
    """Body of ``POST /agents``; the same name is the same agent."""

    name: str
    host: str
    slots: list[SlotInfo]
    pool: str = DEFAULT_POOL
    """The pool that it joins."""
    identity: str = ""
    """Of its data directory: another one cannot take the name of an agent that is there."""


class AgentLeave(msgspec.Struct, frozen=True):
    """Body of ``POST /agents/{id}/leave``."""

    done: bool = False
    """Its runs have ended, and it is gone; else it asks that nothing new starts there."""


class WorkItem(msgspec.Struct, frozen=True):
    """A run that an agent shall run, or kill."""

    run_id: int
    action: Literal["run", "kill"]
    spec: RunSpec
    """``model_dir`` and ``run_dir`` are empty: the agent fills in its own."""
    archive: str
    """Path, on the server, of the model directory as tar.gz."""
    slot_ids: list[int]
    grace_s: float = KILL_GRACE_S
    """Seconds between SIGTERM and SIGKILL, of a run that shall be killed."""


class AgentWork(msgspec.Struct, frozen=True):
    """Answer to ``GET /agents/{id}/work``: all that the agent shall be running."""

    version: int
    runs: list[WorkItem]


class RunExit(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/exited``."""

    exit_code: int
    """As a shell shows it; a death by signal n is -n."""
    reason: str | None = None
    """One line for the user."""
    log_tail: str = ""
    """The last lines of the rank that failed, traceback included."""
    node: int = 0
    """Node rank of the agent, of a run that has several."""
    told: bool = False
    """The ranks were told to stop, and decide nothing where others failed."""


class RunActivity(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/activity``: what a run does before its ranks are there."""

    text: str
    """A few words, shown as the trial's ``activity``."""


class Meeting(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/meeting``: where the ranks of several agents meet."""

    address: str
    """Of the agent of node rank 0, as the others reach it."""
    port: int


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def wire_number(value: float) -> float | str:
    """Return ``value`` as JSON may carry it."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def plain_number(value: float | str) -> float:
    """Undo :func:`wire_number`.

    Raises:
        ValueError: If ``value`` is another string.
    """
    if isinstance(value, str):
        if value not in _NOT_FINITE:
            msg = f"metric value: must be a number, NaN, Infinity or -Infinity, got {value!r}"
            raise ValueError(msg)
        return _NOT_FINITE[value]
    return float(value)
