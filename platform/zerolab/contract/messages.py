"""Messages between a run, its agent and the server, as msgspec types.

Both ends import this module. A batch is a struct here and a map in the message, so JSON and
MessagePack carry the same data. Every time is in seconds since 1970 (UTC, float). MessagePack
can carry numbers that are not finite. JSON cannot, so it carries the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"`` (:func:`wire_number`, :func:`plain_number`).
"""

import math
from typing import Annotated, Any, Literal

import msgspec

from zerolab.contract.limits import SLOTS
from zerolab.contract.media import MediaRecord
from zerolab.contract.names import DEFAULT_POOL
from zerolab.contract.spec import RunSpec

__all__ = [
    "JSON",
    "KILL_GRACE_S",
    "LEAVE_GRACE_S",
    "LENGTH_BYTES",
    "MSGPACK",
    "AgentLeave",
    "AgentLoad",
    "AgentRegistration",
    "AgentWork",
    "AlertRecord",
    "BatchReceipt",
    "BoundReached",
    "CheckpointRecord",
    "Directive",
    "Extension",
    "LogBatch",
    "LogEntry",
    "MetricsColumns",
    "MetricsRecord",
    "ProgressRecord",
    "Record",
    "RendezvousAddress",
    "ReportBatch",
    "RunActivity",
    "RunExit",
    "SlotInfo",
    "SlotLoad",
    "StateRecord",
    "WorkItem",
    "plain_number",
    "wire_number",
]

JSON = "application/json"
MSGPACK = "application/x-msgpack"

KILL_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL of a run that is killed."""
LEAVE_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL of a preempted run that does not poll for directives."""


LENGTH_BYTES = 4
"""Size of the length before each :class:`MetricsColumns` of an export, little-endian."""


class MetricsColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """Points of one metric of a trial in an export; the arrays have little-endian numbers."""

    trial_id: int
    group: str | None
    name: str | None
    """Metric of the points; None if the trial cannot be read."""
    steps: bytes
    """Integers of 8 bytes."""
    values: bytes
    """Floats of 8 bytes; NaN for missing values."""
    times: bytes
    """Floats of 8 bytes: seconds since 1970."""
    problem: str | None = None
    """Why points are missing, if the server cannot read them."""


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
    """Progress of the trial, from 0 to 1."""

    value: float
    time: float


class StateRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """Phase of the run: starting, restoring, training, validating or checkpointing."""

    state: str
    time: float


class AlertRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="alert"):
    """Message of the trial's code for the log and for notification channels."""

    title: str
    text: str
    time: float


class CheckpointRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """A checkpoint that is complete in the storage."""

    uuid: str
    steps_completed: int
    resources: dict[str, int]
    """Path inside the checkpoint to its size in bytes."""
    metadata: dict[str, Any]
    time: float


Record = MetricsRecord | ProgressRecord | StateRecord | CheckpointRecord | MediaRecord | AlertRecord


class ReportBatch(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/reports``: records in order, numbered from 1 in each run."""

    first: int
    """Number of the first record in ``records``."""
    records: list[Record]


class LogEntry(msgspec.Struct, frozen=True):
    """One line from a rank, or from the agent about it."""

    text: str
    time: float
    rank: int | None = None
    stream: Literal["stdout", "stderr", "agent", "server"] = "stdout"
    level: str | None = None
    """``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL`` if known."""


class LogBatch(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/logs``: entries in order, numbered from 0 in each run."""

    first: int
    entries: list[LogEntry]
    node: int = 0
    """Node rank of the agent, in a run on several agents; each agent numbers its entries."""


class BatchReceipt(msgspec.Struct, frozen=True):
    """Response to a batch.

    For reports, the number of the last record that is stored (0 for none). For logs, the number of
    the next entry that the server expects.
    """

    stored: int


class BoundReached(msgspec.Struct, frozen=True):
    """Message of a run that reached its searcher's bound."""

    until: int
    """The bound, in the unit of the search."""


class Extension(msgspec.Struct, frozen=True):
    """Decision whether a run continues beyond its bound or releases its slots."""

    goes_on: bool
    until: int | None = None
    """The next bound, in the unit of the search; None when it may train to its length."""


class Directive(msgspec.Struct, frozen=True):
    """Instruction to a run: continue, or checkpoint and exit with code 66."""

    action: Literal["train", "preempt", "stop"]
    version: int
    """Sent back as ``version`` with the next request, which then waits for a change."""
    deadline_s: float | None = None
    """Seconds from now until the deadline; None for no limit."""
    cause: str | None = None
    """Why the run must exit, such as "canceled" or "paused"; None if it was preempted."""


class SlotInfo(msgspec.Struct, frozen=True):
    """A device that an agent offers."""

    id: int
    device: str
    """``cpu``, or ``cuda:0 NAME``."""
    node: int | None = None
    """Number of its node, if the agent offers a cluster's nodes; None on the agent's machine."""
    down: bool = False
    """The cluster has a node too few for it now. Only the number of nodes that are down counts: the
    server knows the slots in use, and decides which slots to close."""


class AgentRegistration(msgspec.Struct, frozen=True):
    """Body of ``POST /agents``; the same name is the same agent."""

    name: str
    host: str
    slots: list[SlotInfo]
    pool: str = DEFAULT_POOL
    """The pool that it joins."""
    identity: str = ""
    """Identity of its data directory; an agent with another identity cannot take a connected
    agent's name."""


class AgentLeave(msgspec.Struct, frozen=True):
    """Body of ``POST /agents/{id}/leave``."""

    done: bool = False
    """Its runs have ended and it is leaving. Otherwise the agent only requests that no new run
    starts."""


class WorkItem(msgspec.Struct, frozen=True):
    """A run that an agent must start or kill."""

    run_id: int
    action: Literal["run", "kill"]
    spec: RunSpec
    """``model_dir`` and ``run_dir`` are empty: the agent fills in its own."""
    archive: str
    """Path, on the server, of the model directory as tar.gz."""
    slot_ids: list[int]
    grace_s: float = KILL_GRACE_S
    """Seconds between SIGTERM and SIGKILL of a run to kill."""


Percent = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class SlotLoad(msgspec.Struct, frozen=True):
    """Load of a slot: the processes of its run, and its GPU."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    cpu_percent: Percent | None = None
    """CPU time of the processes; 100 is one core. None if nothing runs in the slot."""
    memory_bytes: Bytes | None = None
    """Resident memory of the processes; pages that they share count for each one."""
    gpu_percent: Percent | None = None
    """Utilization of the GPU by any program; None without a GPU, or if it does not report it."""
    gpu_memory_bytes: Bytes | None = None
    gpu_memory_total_bytes: Bytes | None = None


class AgentLoad(msgspec.Struct, frozen=True):
    """Body of ``POST /agents/{id}/work``: load of the agent's machine and of its slots."""

    cpu_percent: Percent
    """CPU time of all programs, of all cores together: at most 100."""
    cores: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    memory_bytes: Bytes
    memory_total_bytes: Bytes
    disk_bytes: Bytes
    """Used bytes of the file system with the agent's data directory."""
    disk_total_bytes: Bytes
    slots: Annotated[list[SlotLoad], msgspec.Meta(max_length=SLOTS)] = []


class AgentWork(msgspec.Struct, frozen=True):
    """Response to a request for work: all runs that the agent should have."""

    version: int
    runs: list[WorkItem]


class RunExit(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/exited``."""

    exit_code: int
    """As a shell shows it, but -n for a death by signal n."""
    reason: str | None = None
    """One line for the user."""
    log_tail: str = ""
    """The last lines of the rank that failed, traceback included."""
    node: int = 0
    """Node rank of the agent, in a run on several agents."""
    was_stopped: bool = msgspec.field(default=False, name="told")
    """The ranks were stopped: the outcome of another node counts, if one failed."""
    unread_hparams: list[str] | None = None
    """Searched hyperparameters that the code did not read; None if that is not known."""


class RunActivity(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/activity``: the activity of a run before its ranks start."""

    text: str
    """A short text, shown as the trial's ``activity``."""


class RendezvousAddress(msgspec.Struct, frozen=True):
    """Body of ``POST /runs/{id}/meeting``: the rendezvous address of ranks on several agents."""

    address: str
    """Address of the agent of node rank 0, as the others reach it."""
    port: int


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def wire_number(value: float) -> float | str:
    """Return a number in a form that JSON can carry."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def plain_number(value: float | str) -> float:
    """Undo :func:`wire_number`.

    Raises:
        ValueError: If the value is another string.
    """
    if isinstance(value, str):
        if value not in _NOT_FINITE:
            msg = f"metric value: must be a number, NaN, Infinity or -Infinity, got {value!r}"
            raise ValueError(msg)
        return _NOT_FINITE[value]
    return float(value)
