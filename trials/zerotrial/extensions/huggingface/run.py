"""The run of this process: joining it once, reporting to it, and leaving it."""

import atexit
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import zerolab.core
from zerolab.contract.outcome import write_reason
from zerolab.contract.spec import (
    ENV_RUN_SPEC,
    ENV_SCRIPT,
    EXIT_USER_ERROR,
    Command,
    RunSpec,
    read_run_spec,
)
from zerolab.core.context import Context
from zerolab.errors import ConfigError, ZerolabError

__all__ = [
    "best_effort_close",
    "experiment",
    "is_script",
    "join",
    "leave",
    "put_back",
    "refuse",
    "store",
]

logger = logging.getLogger(__name__)


@functools.cache
def experiment() -> RunSpec | None:
    """The run of an experiment that this script is the entrypoint of; None for one on its own."""
    path = os.environ.get(ENV_RUN_SPEC)
    spec = read_run_spec(Path(path)) if path else None
    return spec if spec is not None and isinstance(spec.entrypoint, Command) else None


def is_script() -> bool:
    """Whether this process is the script of an experiment, and none that the script has started."""
    pid = str(os.getpid())
    return experiment() is not None and os.environ.get(ENV_SCRIPT, pid) == pid


@functools.cache
def join() -> Context:
    """Join the run, or start one without a server. **Collective** the first time.

    A script that has already joined through the Core API keeps its context.
    """
    context = zerolab.core.current() or zerolab.core.init()
    atexit.register(context.close)
    return context


def refuse(spec: RunSpec, error: ZerolabError) -> NoReturn:
    """End a script that can never work with its experiment's configuration, and explain it.

    Raises:
        SystemExit: With the code that prevents restarts of the trial.
    """
    logger.error("%s", error)
    rank = int(os.environ.get("RANK", "0")) if spec.slots > 1 else None
    write_reason(spec.run_dir, EXIT_USER_ERROR, str(error), rank)
    sys.stderr.write(f"{error}\n")
    sys.exit(EXIT_USER_ERROR)


def leave(context: Context) -> NoReturn:
    """End the process after a checkpoint, with the corresponding code. **Collective**.

    Raises:
        SystemExit: Always.
    """
    _end_torch()
    context.__exit__(None, None, None)
    sys.exit(0)


def best_effort_close(context: Context, error: ZerolabError) -> None:
    """Report a failure of ours to the server, which sees failures of the script itself.

    Raises:
        SystemExit: If the failure has its own exit code.
    """
    context.__exit__(type(error), error, error.__traceback__)


def _end_torch() -> None:
    import torch.distributed as dist

    from zerotrial.engine.comm.process_group import destroy_process_groups

    if dist.is_available() and dist.is_initialized():
        destroy_process_groups()


def store(context: Context, folder: Path, metadata: Mapping[str, Any]) -> str:
    """Make a checkpoint of all ranks' files in a folder. **Collective**.

    The files are copied rather than linked because the script may write to them again.

    Args:
        context: Context of the run.
        folder: The same path on every rank, shared by the ranks of a machine.
        metadata: Metadata of the checkpoint; the same on every rank.

    Returns:
        The checkpoint's uuid.
    """
    ranks = context.distributed
    ranks.barrier()  # the others may still be writing
    with context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
        if ranks.local_rank == 0:
            shutil.copytree(folder, path, dirs_exist_ok=True)
    return uuid


def put_back(context: Context, uuid: str, folder: Path) -> None:
    """Have a checkpoint's files in a folder again, and nothing else there. **Collective**."""
    with context.distributed.together("the checkpoint cannot be put back"):
        if context.distributed.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            context.checkpoint.download(uuid, folder)
    context.distributed.barrier()


def read_json_of(folder: Path, name: str) -> dict[str, Any]:
    """Read a file of a checkpoint.

    Raises:
        ConfigError: If it is not there: the checkpoint is not one of this kind of script.
    """
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"must be a checkpoint of a Trainer, with a {name}: {error}"
        raise ConfigError("checkpoint", [problem]) from error
    return content
