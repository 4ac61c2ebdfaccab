"""Determined's Core API on :mod:`zerolab.core`."""

import enum
import os
from pathlib import Path
from typing import Any, Self

from zerolab import core
from zerolab.core.context import Context
from zerolab.errors import ConfigError

__all__ = ["DistributedContext", "PreemptMode", "TensorboardMode", "init"]


class PreemptMode(enum.Enum):
    """Ranks that check for preemption; here every rank may, in each mode."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class TensorboardMode(enum.Enum):
    """Ranks that upload files of TensorBoard; nothing is uploaded here."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class DistributedContext:
    """Ranks of a task, for the argument ``distributed``; its values come from torchrun's variables.

    The context of :func:`init` has its own ranks, with the collectives.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        local_size: int = 1,
        cross_rank: int = 0,
        cross_size: int = 1,
        chief_ip: str | None = None,
        **options: Any,
    ) -> None:
        del chief_ip, options  # ports and time-outs
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.cross_rank, self.cross_size = cross_rank, cross_size

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> Self:
        """Read the variables that torchrun and the launcher set."""

        def read(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        size, local_size = read("WORLD_SIZE", 1), read("LOCAL_WORLD_SIZE", 1)
        return cls(
            rank=read("RANK", 0),
            size=size,
            local_rank=read("LOCAL_RANK", 0),
            local_size=local_size,
            cross_rank=read("GROUP_RANK", 0),
            cross_size=max(1, size // local_size),
            chief_ip=chief_ip,
        )

    from_deepspeed = from_torch_distributed
    from_horovod = from_torch_distributed

    def get_rank(self) -> int:
        """Return the rank."""
        return self.rank

    def get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def get_local_rank(self) -> int:
        """Return the rank on this machine."""
        return self.local_rank

    def close(self) -> None:
        """Do nothing; the context of :func:`init` closes its connections."""


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | dict[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Return the context of :func:`zerolab.core.init`. **Collective**.

    Args:
        distributed: Must have the ranks of torchrun's variables, from which this context has them.
        checkpoint_storage: Storage of checkpoints outside an experiment.
        preempt_mode: Ignored: every rank may call ``should_preempt()``.
        tensorboard_mode: Ignored.

    Raises:
        ConfigError: If ``distributed`` has other ranks, such as those of the script's launcher.
    """
    del preempt_mode, tensorboard_mode
    ranks = DistributedContext.from_torch_distributed()
    if distributed is not None and (distributed.rank, distributed.size) != (ranks.rank, ranks.size):
        problem = "distributed: must have the rank and size of RANK and WORLD_SIZE"
        got = f"got rank {distributed.rank} of {distributed.size}"
        remedy = "let Zerolab start the ranks (resources.slots_per_trial), or use torchrun"
        raise ConfigError("core.init", [f"{problem}, {got}; {remedy}"])
    storage = (
        str(checkpoint_storage) if isinstance(checkpoint_storage, Path) else checkpoint_storage
    )
    return core.init(checkpoint_storage=storage)
