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
from collections.abc import Mapping, Sequence
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
from zerolab.contract.storage import StorageAddress
from zerolab.core.context import Context
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError, StorageError
from zerolab.registry import PARTS
from zerolab.replacements import import_error, replacements
from zerolab.storage.store import CheckpointStore, local_owner

__all__ = ["Context", "alert", "current", "init"]

logger = logging.getLogger(__name__)


def current() -> Context | None:
    """Return the newest open context of this process.

    Returns:
        The context, or None outside of a ``with zerolab.core.init()`` block.

    Example:
        >>> with zerolab.core.init() as context:
        ...     zerolab.core.current() is context
        True
    """
    return Context.newest_open


def alert(title: str, text: str = "") -> None:
    """Send a message as :meth:`Context.alert` of the open context does.

    For code that a script calls. Without an open context it is a warning in the log.

    Args:
        title: At most 200 characters; the rest is cut off.
        text: At most 4,000 characters; the rest is cut off.

    Example:
        >>> with zerolab.core.init() as context:
        ...     zerolab.core.alert("Data set incomplete", "12 of 100 shards are missing")
    """
    context = current()
    if context is None:
        logger.warning("alert outside of a context is not sent: %s", title)
    else:
        context.alert(title, text)


def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    directory: Path | str | None = None,
    checkpoint_storage: Mapping[str, Any] | str | None = None,
    server: str | None = None,
    token: str = "",
    name: str = "",
    id: str = "",  # noqa: A002 - the name that other trackers use
    labels: Sequence[str] = (),
    project: str = "",
    timeout_s: float = 1800.0,
    **unsupported: Any,
) -> Context:
    """Join the run of this process, or start one.

    **Collective**: under torchrun, or as an entrypoint with several slots, every rank calls it.

    Args:
        hparams: Hyperparameters of a run without a server; ignored under a server.
        directory: Directory for ``metrics.jsonl`` and ``checkpoints/`` of a run without a server. A
            directory with a checkpoint is continued from there. A new directory below
            ``.zerolab/runs`` when None; ignored under a server.
        checkpoint_storage: Other storage for the checkpoints of a run without a server: a
            directory, a URL such as ``s3://bucket/prefix``, or a block ``checkpoint_storage`` as in
            experiment files. Existing checkpoints are continued. Ignored under a server.
        server: Address of a server to which this script reports as an experiment that the scheduler
            does not manage, or ``""`` to only write to disk. Reports are written to
            ``.zerolab/live`` first; ``zerolab sync`` sends what could not be sent. Checkpoints stay
            on this machine. Ignored under a server.
        token: Token of a user of ``server``; by default ``ZEROLAB_TOKEN``, or the token of the
            installation on this machine.
        name: Name of the experiment of ``server``; by default that of the script.
        id: Id of the run of ``server``, unique for the user. A script that uses it again continues
            the experiment, and its checkpoints if the directory is the same. A new one by default.
        labels: Labels of a new experiment of ``server``.
        project: Project of a new experiment of ``server``; by default ``default``.
        timeout_s: Maximum wait for the other ranks in a collective, in seconds.
        unsupported: Arguments of Determined's ``init``, rejected with their replacement.

    Returns:
        The context of the run; use it in a ``with`` block.

    Raises:
        TypeError: If there are unsupported arguments.
        ConfigError: If ``checkpoint_storage`` cannot be read or its package is missing, torchrun's
            variables are incomplete, or the run spec cannot be read.
        StorageError: If checkpoints cannot be written to the storage.
        SystemExit: The same under a server, with the exit code that makes the run wait for its
            storage.
        ZerolabError: If the ranks do not find each other in time.

    Example:
        >>> with zerolab.core.init(hparams={"lr": 0.1}) as context:
        ...     context.train.report_training_metrics(1, {"loss": 0.5})
    """
    if unsupported:
        hints = {key.rstrip(")"): f": {text}" for key, text in replacements("init(").items()}
        problems = [f"init() has no argument {key!r}{hints.get(key, '')}" for key in unsupported]
        raise TypeError("; ".join(problems))
    spec_path = os.environ.get(ENV_RUN_SPEC)
    if spec_path:
        info = _read_spec(Path(spec_path))
        distributed = SocketRanks.from_environment(
            f"{info.run_id} {info.token}", timeout_s=timeout_s
        )
        store = CheckpointStore.of_run(info)
        try:
            _check_storage(store, distributed)
        except StorageError as error:
            distributed.close()
            write_reason(info.run_dir, EXIT_INFRASTRUCTURE, str(error))
            logger.error("%s", error)  # noqa: TRY400 - the traceback is of no interest
            sys.exit(EXIT_INFRASTRUCTURE)
        return Context(info, distributed, store, platform=True)
    if server is not None:
        if checkpoint_storage is not None:
            problem = "checkpoint_storage: must not be set with server; checkpoints stay local"
            raise ConfigError("init", [problem])
        context: Context = PARTS["live_runs"].init_live(
            server=server, token=token, name=name, id=id, labels=labels, project=project,
            hparams=hparams, directory=directory, timeout_s=timeout_s,
        )  # fmt: skip
        return context
    if problem := ", ".join(
        key
        for key, value in {
            "token": token,
            "name": name,
            "id": id,
            "labels": labels,
            "project": project,
        }.items()
        if value
    ):
        raise ConfigError("init", [f"{problem}: must be set with server; set server"])
    address = _address(checkpoint_storage)
    distributed = SocketRanks.from_environment(timeout_s=timeout_s)
    chosen = distributed.broadcast(str(_local_directory(directory)))
    address = address or StorageAddress(root=str(Path(chosen) / "checkpoints"))
    owner, cache = local_owner(address, chosen), str(Path(chosen) / "cache")
    store = CheckpointStore(address, owner=owner, local=cache)
    _check_storage(store, distributed)
    latest = store.latest() if distributed.is_chief else None
    latest_fields: list[Any] | None = [latest.uuid, latest.steps_completed] if latest else None
    checkpoint = distributed.broadcast(latest_fields)
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
        checkpoint_dir=address.root,
        storage_options=address.options,
        storage_owner=owner,
        checkpoint_cache=cache,
        latest_checkpoint=CheckpointRef(*checkpoint) if checkpoint else None,
    )
    context = Context(info, distributed, store, platform=False)
    context.show_results_in(Path(chosen))
    return context


def __getattr__(name: str) -> Any:
    """Raise an error with the replacement of one of Determined's names.

    Raises:
        ImportError: If Determined has the name.
        AttributeError: If it does not.
    """
    raise import_error(__name__, name, "determined.core") or AttributeError(
        f"module {__name__!r} has no attribute {name!r}"
    )


def _check_storage(store: CheckpointStore, ranks: SocketRanks) -> None:
    """Sweep the storage and test a write, before hours of training that could not be saved.

    **Collective**.
    """
    with ranks.together("the run cannot start"):
        if ranks.is_chief:
            store.sweep()  # incomplete checkpoints of an earlier run
    with ranks.together("the run cannot start"):
        if ranks.local_rank == 0:
            store.probe()


def _read_spec(path: Path) -> RunSpec:
    try:
        return read_run_spec(path)
    except (OSError, msgspec.DecodeError) as error:
        problem = f"must name this run's specification, which the agent writes: {error}"
        raise ConfigError("environment", [f"{ENV_RUN_SPEC}: {problem}"]) from error


def _address(storage: Mapping[str, Any] | str | None) -> StorageAddress | None:
    if isinstance(storage, Mapping):
        # Imported lazily: it needs pydantic, which a script with a directory does not.
        from zerolab.config.experiment.storage import read_address

        return read_address(storage)
    if storage is None:
        return None
    if not isinstance(storage, str) or not storage:
        problem = f"must be a directory, a URL or a block of an experiment file, got {storage!r}"
        raise ConfigError("init", [f"checkpoint_storage: {problem}"])
    address = StorageAddress(root=storage if "://" in storage else str(Path(storage).absolute()))
    if address.is_remote:
        from zerolab.storage.registry import check_installed

        check_installed(address)
    return address


def _local_directory(directory: Path | str | None) -> Path:
    if directory is not None:
        return Path(directory).absolute()
    now = datetime.datetime.now(datetime.UTC)
    return Path.cwd() / ".zerolab" / "runs" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"
