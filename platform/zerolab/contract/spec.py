"""What an agent and the processes of a trial agree on: one file, its names and exit codes.

An agent writes a :class:`RunSpec` as JSON and names it in :data:`ENV_RUN_SPEC`; every rank reads
it. torch's own variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``, ...) are set by the elastic agent and mean what they mean everywhere.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = [
    "ENV_COLLECTIVE_TIMEOUT",
    "ENV_HOME",
    "ENV_MASTER",
    "ENV_RUN_SPEC",
    "ENV_TOKEN",
    "EXIT_INFRASTRUCTURE",
    "EXIT_INVALID_HP",
    "EXIT_PREEMPTED",
    "EXIT_STALE",
    "EXIT_USER_ERROR",
    "CheckpointRef",
    "Command",
    "FitSpec",
    "LengthSpec",
    "ProfilingSpec",
    "RunSpec",
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

ENV_RUN_SPEC = "ZEROLAB_RUN_SPEC"
"""Path of the JSON file that holds the :class:`RunSpec` of this process's run."""

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


class CheckpointRef(msgspec.Struct, frozen=True):
    """A checkpoint that a run starts from."""

    uuid: str
    steps_completed: int
    """Batches (optimizer steps) that it holds."""


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

    def __str__(self) -> str:
        return shlex.join(self.words)


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


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trial trains and when it does what, as its experiment says."""

    max_length: LengthSpec | None
    """None where the script decides."""
    metric: str
    """Validation metric that tells which checkpoint is best."""
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
    data: dict[str, Any] = {}
    """The experiment's ``data`` block."""
    trial_seed: int
    slots: int
    """Ranks of this run, over all machines."""
    model_dir: str
    """This run's own unpacked copy of the model directory; the ranks' working directory."""
    run_dir: str
    """This run's scratch directory on its machine: spool, logs, traces."""
    checkpoint_dir: str
    """Root of the checkpoint storage; a checkpoint is the directory named by its uuid."""
    master: str = ""
    """Address of the server; empty when there is none."""
    token: str = ""
    latest_checkpoint: CheckpointRef | None = None
    restarts: int = 0
    """How often this trial has failed before."""
    test_mode: bool = False
    """One batch, one validation, one checkpoint, then the end."""


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
