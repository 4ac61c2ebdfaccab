"""Functions that scripts call as ``deepspeed.<name>``, under the same names."""

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zerolab.errors import ConfigError
from zerotrial.engine.comm.process_group import start_process_group

__all__ = ["add_config_arguments", "init_distributed"]

_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that ``initialize(args=...)`` reads.

    Args:
        parser: Argument parser of the script.

    Returns:
        The parser, with ``--deepspeed`` and ``--deepspeed_config FILE``.

    Example:
        >>> import argparse
        >>> parser = zerotrial.add_config_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(["--deepspeed_config", "ds_config.json"]).deepspeed_config
        'ds_config.json'
    """
    group = parser.add_argument_group("Zerolab", "the engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script to look at; changes nothing here"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine file")
    return parser


def init_distributed(  # noqa: PLR0917 - DeepSpeed's order
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    distributed_port: int = 29500,
    verbose: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,  # noqa: FBT001 - DeepSpeed's
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed, unless it is running. **Collective**.

    ``initialize`` calls it; scripts need it only to use ranks before. Without settings of several
    ranks in the environment, the process is the only rank.

    Args:
        dist_backend: nccl on GPUs and gloo on CPUs by default.
        auto_mpi_discovery: Unused: ranks are found by torchrun's variables.
        distributed_port: Unused; it is in the environment.
        verbose: Unused.
        timeout: Timeout of collectives; torch's by default.
        init_method: As in ``torch.distributed.init_process_group``.
        dist_init_required: False: do nothing.
        config: Unused.
        rank: Rank of this process; from the environment by default.
        world_size: Number of ranks; from the environment by default.

    Raises:
        ConfigError: If another launcher has started several processes without torch's variables.

    Example:
        >>> zerotrial.init_distributed()
        >>> torch.distributed.get_world_size()
        1
    """
    del auto_mpi_discovery, distributed_port, verbose, config
    if dist.is_initialized() or dist_init_required is False:
        return
    cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if cuda else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if world_size < 0 and init_method is None and "WORLD_SIZE" not in os.environ:
        _check_alone()
        start_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    start_process_group(
        backend, init_method=init_method, timeout=timeout, world_size=world_size, rank=rank
    )


def _check_alone() -> None:
    for name in _OTHER_LAUNCHERS:
        count = os.environ.get(name, "1")
        if count.isdigit() and int(count) > 1:
            msg = f"WORLD_SIZE: must be set where several ranks run, got nothing and {name}={count}"
            raise ConfigError("init_distributed()", [f"{msg}; start the script with torchrun"])
