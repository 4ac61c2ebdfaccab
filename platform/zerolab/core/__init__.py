"""Core API: metrics, checkpoints, preemption and ranks for any script, with or without a server.

::

    with zerolab.core.init() as context:
        for step in range(1, 1001):
            loss = train_one_batch()
            context.train.report_training_metrics(step, {"loss": loss})
            if context.preempt.should_preempt():
                with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
                    save(path)
                break
"""

import datetime
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from zerolab.contract.outcome import write_reason
from zerolab.contract.spec import (
    ENV_RUN_SPEC,
    EXIT_INFRASTRUCTURE,
    CheckpointRef,
    RunSpec,
    read_run_spec,
)
from zerolab.core.context import Context
from zerolab.core.socket_ranks import SocketRanks
from zerolab.core.store import CheckpointStore
from zerolab.errors import ConfigError, StorageError

__all__ = ["Context", "init"]

logger = logging.getLogger(__name__)


def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    directory: Path | str | None = None,
    timeout_s: float = 1800.0,
) -> Context:
    """Join the run that this process belongs to, or begin one without a server.

    **Collective**: under torchrun, or as an entrypoint with several slots, every rank calls it.

    Args:
        hparams: Hyperparameters where no server gives any; ignored under a server.
        directory: Where a run without a server keeps ``metrics.jsonl`` and ``checkpoints/``. One
            that holds a checkpoint already is continued from there. A new directory below
            ``.zerolab/runs`` when None; ignored under a server.
        timeout_s: Longest wait for the other ranks in a collective, in seconds.

    Raises:
        ConfigError: If torchrun's variables are incomplete, or the run spec cannot be read.
        StorageError: If checkpoints cannot be written where they would go.
        SystemExit: The same under a server, with the code that has the run wait for its storage.
        ZerolabError: If the ranks do not find each other in time.
    """
    spec_path = os.environ.get(ENV_RUN_SPEC)
    if spec_path:
        info = _read(Path(spec_path))
        distributed = SocketRanks.from_environment(
            f"{info.run_id} {info.token}", timeout_s=timeout_s
        )
        store = CheckpointStore(info.checkpoint_dir, owner=f"trial-{info.trial_id}")
        if distributed.is_chief:
            store.sweep()  # what an earlier run of this trial died over
        distributed.barrier()
        try:
            _try_storage(store, distributed)
        except StorageError as error:
            distributed.close()
            write_reason(info.run_dir, EXIT_INFRASTRUCTURE, str(error))
            logger.error("%s", error)  # noqa: TRY400 - where in our code is of no interest
            sys.exit(EXIT_INFRASTRUCTURE)
        return Context(info, distributed, store, platform=True)
    distributed = SocketRanks.from_environment(timeout_s=timeout_s)
    chosen = distributed.broadcast(str(_local_directory(directory)))
    store = CheckpointStore(Path(chosen) / "checkpoints")
    if distributed.is_chief:
        store.sweep()
    distributed.barrier()
    _try_storage(store, distributed)
    latest = store.latest() if distributed.is_chief else None
    furthest: list[Any] | None = [latest.uuid, latest.steps_completed] if latest else None
    found = distributed.broadcast(furthest)
    info = RunSpec(
        experiment_id=0,
        trial_id=0,
        run_id=0,
        config={"name": Path.cwd().name, "hyperparameters": dict(hparams or {})},
        hparams=dict(hparams or {}),
        trial_seed=0,
        slots=distributed.size,
        model_dir=str(Path.cwd()),
        run_dir=chosen,
        checkpoint_dir=str(Path(chosen) / "checkpoints"),
        latest_checkpoint=CheckpointRef(*found) if found else None,
    )
    return Context(info, distributed, store, platform=False)


def _try_storage(store: CheckpointStore, ranks: SocketRanks) -> None:
    """Write to the storage before hours go into what could not be saved. **Collective**."""
    with ranks.together("the run cannot begin"):
        if ranks.local_rank == 0:
            store.probe()


def _read(path: Path) -> RunSpec:
    try:
        return read_run_spec(path)
    except (OSError, msgspec.DecodeError) as error:
        problem = f"must name this run's specification, which the agent writes: {error}"
        raise ConfigError("environment", [f"{ENV_RUN_SPEC}: {problem}"]) from error


def _local_directory(directory: Path | str | None) -> Path:
    if directory is not None:
        return Path(directory).absolute()
    now = datetime.datetime.now(datetime.UTC)
    return Path.cwd() / ".zerolab" / "runs" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"
