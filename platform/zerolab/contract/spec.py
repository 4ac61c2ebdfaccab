"""What an agent and the processes of a trial agree on: one file, its names and exit codes.

An agent writes a :class:`RunSpec` as JSON and names it in :data:`ENV_RUN_SPEC`; every rank reads
it. torch's own variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``, ...) are set by the elastic agent and mean what they mean everywhere.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec

from zerolab.contract.storage import StorageAddress

__all__ = [
    "ENV_AS_DEEPSPEED",
    "ENV_COLLECTIVE_TIMEOUT",
    "ENV_DATABASE",
    "ENV_HOME",
    "ENV_HOSTS",
    "ENV_MASTER",
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

ENV_HOME = "ZEROLAB_HOME"
"""Directory of an installation's data; ``~/.zerolab`` when unset."""

ENV_MASTER = "ZEROLAB_MASTER"
"""Address of the server for the command line, e.g. ``http://127.0.0.1:8080``."""

ENV_TOKEN = "ZEROLAB_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""Token for the command line; the installation's own token file when unset."""

ENV_DATABASE = "ZEROLAB_DATABASE"
"""Address of the server's database, e.g. ``postgresql://USER:PASSWORD@HOST/NAME``; the SQLite file
of the data directory when unset. Agents and trials do not get it."""

ENV_RUN_SPEC = "ZEROLAB_RUN_SPEC"
"""Path of the JSON file that holds the :class:`RunSpec` of this process's run."""

ENV_SCRIPT = "ZEROLAB_SCRIPT_PROCESS"
ENV_HOSTS = "ALL_WORKERS"
"""Set for the ranks of a command: the hosts of the run, with commas between them, the chief's
first. Platforms for deep learning give it to their jobs."""
"""Process id of the Python that a command runs in a rank; what that starts are other processes."""

ENV_STAGED = "ZEROLAB_STAGED_DATA"
"""Directory of the data that was staged on this machine; unset when none was."""

ENV_AS_DEEPSPEED = "ZEROLAB_AS_DEEPSPEED"
"""1: Python processes find this engine by the name ``deepspeed``; ``force``: before a real one."""

ENV_COLLECTIVE_TIMEOUT = "ZEROLAB_COLLECTIVE_TIMEOUT"
"""Seconds that a rank waits for the others in a collective before it gives up; 600 when unset."""

EXIT_USER_ERROR = 64
"""The trial can never work as it is written or configured: no restart."""

EXIT_INVALID_HP = 65
"""The trial declared its hyperparameters impossible: it ends early, no restart."""

EXIT_PREEMPTED = 66
"""The run was asked to stop, has saved a checkpoint and gave its slots back: not a failure."""

EXIT_STALE = 67
"""Another run has taken over: this one stopped without touching anything."""

EXIT_INFRASTRUCTURE = 68
"""What the run stood on failed, its machine, its agent or its storage, and not the trial: it waits
and runs again, however often; ``max_restarts`` does not count it."""

EXIT_REACHED = 69
"""The run has trained as far as the searcher let it, has validated, saved a checkpoint and gave its
slots back: the searcher decides whether the trial goes on."""


class CheckpointRef(msgspec.Struct, frozen=True):
    """A checkpoint that a run starts from."""

    uuid: str
    steps_completed: int
    """Batches (optimizer steps) of this trial that it holds; 0 for a warm start."""
    root: str = ""
    """Root of the storage that it lies in; empty for the run's own."""
    options: dict[str, str] = {}
    """How to open that storage; see :class:`StorageAddress`."""
    warm_start: bool = False
    """It is another trial's: weights are taken from it, and counters begin anew."""
    saved_on: str = ""
    """The agent on which it was saved, where the run that starts from it is on another one."""

    @property
    def storage(self) -> StorageAddress | None:
        """Where it lies; None for the run's own storage."""
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
    """Where among the words ``--local_rank=N`` is put in, N a rank's own; None for nowhere."""
    plain: bool = False
    """The ranks know nothing of a run, as under torchrun: they find torch's variables alone."""
    cores: tuple[int, ...] | None = None
    """CPU cores that the ranks of a machine share out, each its own; all when empty, None to bind
    no rank."""

    def __str__(self) -> str:
        return shlex.join(self.words)


class Nodes(msgspec.Struct, frozen=True):
    """The machines of a run, as one of them sees them."""

    slots: tuple[int, ...]
    """Ranks on each machine, by node rank."""
    rank: int
    """Node rank of this machine; the first one, 0, is where the ranks meet."""
    address: str
    """Of the first machine, as the others reach it."""
    port: int
    """On which its launcher lets them meet; for the first machine itself 0 means any."""


class HostSlots(msgspec.Struct, frozen=True):
    """A machine of a hostfile, and which of its slots a run takes."""

    host: str
    """As ssh knows it, ``user@`` included."""
    slots: tuple[int, ...]


class LengthSpec(msgspec.Struct, frozen=True):
    """So many batches (optimizer steps) or epochs; at least one."""

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
        """Whether a batch, counted from 0, is timed."""
        if not self.enabled or batch < self.begin_on_batch:
            return False
        return self.end_after_batch is None or batch <= self.end_after_batch


class StageSpec(msgspec.Struct, frozen=True):
    """Data that is copied to a place of each machine before its ranks start."""

    source: str
    """An absolute path, or a URL."""
    to: str
    """An absolute path."""
    per_trial: bool = False
    """Each run has a copy of its own, which goes with it."""

    def place(self, trial_id: int) -> Path:
        """The directory in which a trial finds the copy."""
        return Path(self.to, f"trial-{trial_id}") if self.per_trial else Path(self.to)


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trial trains and when it does what, as its experiment says."""

    max_length: LengthSpec | None
    """None where the script decides."""
    until: int | None = None
    """Where this run pauses, in the unit of ``max_length``; None when it goes all the way."""
    validate_at: tuple[int, ...] = ()
    """Lengths, in the unit of ``max_length``, after which the searcher compares trials."""
    metric: str | None = None
    """Validation metric that tells which checkpoint is best; None where there is none."""
    smaller_is_better: bool = True
    scheduling_unit: int = 100
    """Batches between reports of training metrics."""
    validation_period: LengthSpec | None = None
    """None: only at the end."""
    checkpoint_period: LengthSpec | None = None
    checkpoint_policy: Literal["best", "all", "none"] = "best"
    initial_validation: bool = False
    records_per_epoch: int = 0
    """Samples in one epoch where the loader has no length; 0 when unknown."""
    profiling: ProfilingSpec = ProfilingSpec()


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the ranks of one run need to know."""

    experiment_id: int
    trial_id: int
    run_id: int
    config: dict[str, Any]
    """The experiment's whole configuration, for the user's code alone: we read what follows."""
    hparams: dict[str, Any]
    """This trial's hyperparameters, nested as in the experiment file."""
    entrypoint: TrialClass | Command | None = None
    """What every rank runs; None outside an experiment."""
    fit: FitSpec | None = None
    """None outside an experiment."""
    variables: dict[str, dict[str, str]] = {}
    """Environment variables of the ranks, by kind of slot: ``cpu`` and ``cuda``."""
    python: str = ""
    """Interpreter of the launcher and the ranks, or the directory of an environment that has one;
    the agent's own when empty."""
    data: dict[str, Any] = {}
    """The experiment's ``data`` block."""
    stage: StageSpec | None = None
    """What of it is copied to each machine first."""
    trial_seed: int
    slots: int
    """Ranks of this run, over all machines."""
    planned_slots: int = 0
    """Ranks that the trial was made for and whose batch it keeps; 0 where it has just these."""
    slots_per_rank: int = 1
    nodes: Nodes | None = None
    """The machines, where there are several."""
    hosts: tuple[HostSlots, ...] = ()
    """Machines of a hostfile, on which the agent starts the ranks over ssh; none for its own."""
    host_names: tuple[str, ...] = ()
    """Names of the machines of the run, by node rank; empty where only they know."""
    fewer: tuple[int, ...] = ()
    """With how many ranks it begins, too, where some of them are not there; the largest first."""
    ssh_config: str = ""
    """For them: inside the model directory, or absolute on the agent's machine; empty for ssh's."""
    grace_s: float = 15.0
    """Seconds that ranks have to checkpoint and end after SIGTERM."""
    model_dir: str
    """This run's own unpacked copy of the model directory; the ranks' working directory."""
    run_dir: str
    """This run's scratch directory on its machine: spool, logs, traces."""
    checkpoint_dir: str
    """Root of the checkpoint storage, a directory or a URL; a checkpoint is named by its uuid."""
    storage_options: dict[str, str] = {}
    """How to open it where it is no directory; see :class:`StorageAddress`."""
    storage_owner: str = ""
    """Under which name unfinished checkpoints lie there; no other trial has it."""
    checkpoint_cache: str = ""
    """This machine's directory for what goes to an object store, and comes from there."""
    master: str = ""
    """Address of the server; empty when there is none."""
    token: str = ""
    latest_checkpoint: CheckpointRef | None = None
    restarts: int = 0
    """How often this trial has failed before."""
    test_mode: bool = False
    """One batch, one validation, one checkpoint, then the end."""

    def __repr__(self) -> str:
        """Leave out what must not end in a log: tokens and credentials."""
        return f"RunSpec(trial_id={self.trial_id}, run_id={self.run_id})"

    @property
    def local_slots(self) -> int:
        """Ranks on this machine."""
        return self.slots if self.nodes is None else self.nodes.slots[self.nodes.rank]

    @property
    def max_batches(self) -> int | None:
        """How far the searcher lets this trial train, where that is said in batches."""
        length = self.fit.max_length if self.fit is not None else None
        return length.count if length is not None and length.unit == "batches" else None


def write_run_spec(spec: RunSpec, path: Path) -> None:
    """Write ``spec`` as JSON, readable by its owner alone, for it holds a token."""
    path.touch(mode=0o600, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_run_spec(path: Path) -> RunSpec:
    """Read what :func:`write_run_spec` wrote.

    Raises:
        OSError: If the file cannot be read.
        msgspec.DecodeError: If it is not a run spec.
    """
    return msgspec.json.decode(path.read_bytes(), type=RunSpec)
