"""What an agent and the processes of a trial agree on: one file, its names and exit codes.

An agent writes a :class:`RunSpec` as JSON and names it in :data:`ENV_RUN_SPEC`; every rank reads
it. torch's own variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``, ...) are set by the elastic agent and mean what they mean everywhere.
"""

from pathlib import Path
from typing import Any

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
    "RunSpec",
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


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the ranks of one run need to know."""

    experiment_id: int
    trial_id: int
    run_id: int
    config: dict[str, Any]
    """The experiment's whole configuration, defaults filled in."""
    hparams: dict[str, Any]
    """This trial's hyperparameters, nested as in the experiment file."""
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
