"""Specification of a run for its processes: the run file, environment variables, exit codes.

An agent writes a :class:`RunSpec` as JSON and puts its path into :data:`ENV_RUN_SPEC`; every
rank reads it. The launcher sets torch's own variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
``MASTER_ADDR``, ``MASTER_PORT``, ...) with their usual meaning.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec

from zerolab.contract.environment import (
    ENV_AS_DEEPSPEED,
    ENV_AS_DETERMINED,
    ENV_AS_WANDB,
    ENV_COLLECTIVE_TIMEOUT,
    ENV_DATABASE,
    ENV_HOME,
    ENV_HOSTS,
    ENV_MASTER,
    ENV_PRELOAD,
    ENV_RUN_SPEC,
    ENV_SCRIPT,
    ENV_STAGED,
    ENV_TOKEN,
)
from zerolab.contract.storage import StorageAddress

__all__ = [
    "ENV_AS_DEEPSPEED",
    "ENV_AS_DETERMINED",
    "ENV_AS_WANDB",
    "ENV_COLLECTIVE_TIMEOUT",
    "ENV_DATABASE",
    "ENV_HOME",
    "ENV_HOSTS",
    "ENV_MASTER",
    "ENV_PRELOAD",
    "ENV_RUN_SPEC",
    "ENV_SCRIPT",
    "ENV_STAGED",
    "ENV_TOKEN",
    "EXIT_INFRASTRUCTURE",
    "EXIT_INVALID_HP",
    "EXIT_PREEMPTED",
    "EXIT_REACHED",
    "EXIT_STALE",
    "EXIT_USER_ERROR",
    "CheckpointRef",
    "Command",
    "FitSpec",
    "HostSlots",
    "LengthSpec",
    "Nodes",
    "ProfilingSpec",
    "RunSpec",
    "StageSpec",
    "TrialClass",
    "read_run_spec",
    "write_run_spec",
]

EXIT_USER_ERROR = 64
"""The trial can never work as it is written or configured: no restart."""

EXIT_INVALID_HP = 65
"""The trial declared its hyperparameters impossible: it ends early, no restart."""

EXIT_PREEMPTED = 66
"""The run was asked to stop, has saved a checkpoint and released its slots: not a failure."""

EXIT_STALE = 67
"""Another run has taken over: this one stopped without changing anything."""

EXIT_INFRASTRUCTURE = 68
"""The machine, the agent or the storage failed, not the trial.

The run is queued again, unless a log policy forbids it; ``max_restarts`` does not count it."""

EXIT_REACHED = 69
"""The run reached its searcher's bound, validated, saved a checkpoint and released its slots.

The searcher decides whether the trial continues."""


class CheckpointRef(msgspec.Struct, frozen=True):
    """A checkpoint that a run starts from."""

    uuid: str
    steps_completed: int
    """Batches (optimizer steps) of this trial that it holds; 0 for a warm start."""
    root: str = ""
    """Root of its storage; empty for the run's own."""
    options: dict[str, str] = {}
    """Options that open that storage; see :class:`StorageAddress`."""
    warm_start: bool = False
    """It is another trial's checkpoint: only weights are loaded, counters start at 0."""
    saved_on: str = ""
    """The agent on which it was saved, if the run that starts from it is on another one."""

    @property
    def storage(self) -> StorageAddress | None:
        """Address of its storage; None for the run's own."""
        return StorageAddress(root=self.root, options=self.options) if self.root else None


class TrialClass(msgspec.Struct, frozen=True, tag="class"):
    """``module:Class`` of a ZeroTrial."""

    module: str
    """As in an import: ``package.module``."""
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Command(msgspec.Struct, frozen=True, tag="command"):
    """A program to run on every rank; no shell reads it."""

    words: tuple[str, ...]
    local_rank_at: int | None = None
    """Index among the words at which ``--local_rank=N`` is inserted; None for no insertion."""
    plain: bool = False
    """The ranks get torch's variables only, as under torchrun, and none of a run."""
    cores: tuple[int, ...] | None = None
    """CPU cores divided among the ranks of a machine: all cores if empty; None binds no rank."""

    def __str__(self) -> str:
        return shlex.join(self.words)


class Nodes(msgspec.Struct, frozen=True):
    """The machines of a run, as one of them sees them."""

    slots: tuple[int, ...]
    """Ranks on each machine, by node rank."""
    rank: int
    """Node rank of this machine; the rendezvous is on the first one, 0."""
    address: str
    """Address of the first machine, as the others reach it."""
    port: int
    """Port of the rendezvous; 0 on the first machine itself means any free one."""


class HostSlots(msgspec.Struct, frozen=True):
    """A machine of a hostfile and the slots that a run takes there."""

    host: str
    """As ssh knows it, ``user@`` included."""
    slots: tuple[int, ...]


class LengthSpec(msgspec.Struct, frozen=True):
    """A number of batches (optimizer steps) or epochs; at least one."""

    unit: Literal["batches", "epochs"]
    count: int


class ProfilingSpec(msgspec.Struct, frozen=True):
    """Timings of the training loop, reported as system metrics."""

    enabled: bool = False
    begin_on_batch: int = 0
    """First batch (counted from 0) that is timed."""
    end_after_batch: int | None = None
    """Last batch that is timed; None for the end of training."""
    sync_timings: bool = True
    """Wait for the GPU before reading the clock."""

    def covers(self, batch: int) -> bool:
        """Return whether a batch, counted from 0, is timed."""
        if not self.enabled or batch < self.begin_on_batch:
            return False
        return self.end_after_batch is None or batch <= self.end_after_batch


class StageSpec(msgspec.Struct, frozen=True):
    """Data that is copied to a directory of each machine before its ranks start."""

    source: str
    """An absolute path, or a URL."""
    to: str
    """An absolute path."""
    per_trial: bool = False
    """Each run has a copy, which is deleted with the run."""

    def target_dir(self, trial_id: int) -> Path:
        """Return the directory in which a trial finds the copy."""
        return Path(self.to, f"trial-{trial_id}") if self.per_trial else Path(self.to)


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Training length of a trial and its validation, checkpoint and report periods."""

    max_length: LengthSpec | None
    """None if the script decides."""
    until: int | None = None
    """Bound at which this run pauses, in the unit of ``max_length``; None for no bound."""
    validate_at: tuple[int, ...] = ()
    """Lengths, in the unit of ``max_length``, after which the searcher compares trials."""
    metric: str | None = None
    """Validation metric by which the best checkpoint is chosen, or None."""
    smaller_is_better: bool = True
    scheduling_unit: int = 100
    """Batches between reports of training metrics."""
    validation_period: LengthSpec | None = None
    """None: only at the end."""
    checkpoint_period: LengthSpec | None = None
    checkpoint_policy: Literal["best", "all", "none"] = "best"
    initial_validation: bool = False
    records_per_epoch: int = 0
    """Samples of an epoch if the loader has no length; 0 if unknown."""
    profiling: ProfilingSpec = ProfilingSpec()


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the ranks of a run need to know."""

    experiment_id: int
    trial_id: int
    run_id: int
    config: dict[str, Any]
    """The experiment's complete configuration, for the user's code only; Zerolab reads the fields
    below."""
    hparams: dict[str, Any]
    """This trial's hyperparameters, nested as in the experiment file."""
    entrypoint: TrialClass | Command | None = None
    """Program of every rank; None outside an experiment."""
    fit: FitSpec | None = None
    """None outside an experiment."""
    variables: dict[str, dict[str, str]] = {}
    """Environment variables of the ranks, by kind of slot: ``cpu`` and ``cuda``."""
    python: str = ""
    """Interpreter of the launcher and the ranks, or the directory of an environment with one; the
    agent's interpreter if empty."""
    data: dict[str, Any] = {}
    """The experiment's ``data`` block."""
    stage: StageSpec | None = None
    """Data that is copied to each machine first."""
    trial_seed: int
    slots: int
    """Ranks of this run, over all machines."""
    planned_slots: int = 0
    """Ranks that the trial was configured for and whose batch size it keeps; 0 if equal to
    ``slots``."""
    slots_per_rank: int = 1
    nodes: Nodes | None = None
    """The machines, if there are several."""
    hosts: tuple[HostSlots, ...] = ()
    """Machines of a hostfile on which the agent starts the ranks over ssh; empty for its own
    machine."""
    host_names: tuple[str, ...] = ()
    """Names of the run's machines by node rank; empty if only the machines know them."""
    fewer: tuple[int, ...] = ()
    """Smaller numbers of ranks with which it may start if machines are missing; the largest
    first."""
    ssh_config: str = ""
    """SSH configuration for ``hosts``: a path inside the model directory, or an absolute one on the
    agent's machine; empty for the default of ssh."""
    grace_s: float = 15.0
    """Seconds that ranks have to checkpoint and end after SIGTERM."""
    model_dir: str
    """This run's own unpacked copy of the model directory; the ranks' working directory."""
    run_dir: str
    """This run's scratch directory on its machine: spool, logs, traces."""
    checkpoint_dir: str
    """Root of the checkpoint storage, a directory or a URL; a checkpoint is named by its uuid."""
    storage_options: dict[str, str] = {}
    """Options of an object store; see :class:`StorageAddress`."""
    storage_owner: str = ""
    """Name of unfinished checkpoints in the storage; unique to the trial."""
    checkpoint_cache: str = ""
    """This machine's directory for files in transfer to and from an object store."""
    master: str = ""
    """Address of the server; empty without a server."""
    token: str = ""
    latest_checkpoint: CheckpointRef | None = None
    restarts: int = 0
    """Number of earlier failures of this trial."""
    test_mode: bool = False
    """One batch, one validation, one checkpoint, then the end."""

    def __repr__(self) -> str:
        """Omit tokens and credentials, which must not appear in logs."""
        return f"RunSpec(trial_id={self.trial_id}, run_id={self.run_id})"

    @property
    def local_slots(self) -> int:
        """Ranks on this machine."""
        return self.slots if self.nodes is None else self.nodes.slots[self.nodes.rank]

    @property
    def max_batches(self) -> int | None:
        """Return the trial's maximum length, if it is in batches."""
        length = self.fit.max_length if self.fit is not None else None
        return length.count if length is not None and length.unit == "batches" else None


def write_run_spec(spec: RunSpec, path: Path) -> None:
    """Write ``spec`` as JSON, readable by its owner only because it has a token."""
    path.touch(mode=0o600, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_run_spec(path: Path) -> RunSpec:
    """Read what :func:`write_run_spec` wrote.

    Raises:
        OSError: If the file cannot be read.
        msgspec.DecodeError: If it is not a run spec.
    """
    return msgspec.json.decode(path.read_bytes(), type=RunSpec)
