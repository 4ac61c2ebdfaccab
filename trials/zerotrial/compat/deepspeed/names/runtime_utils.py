"""``deepspeed.runtime.utils``, of which scripts use two functions."""

import logging
import random

import numpy as np
import torch
import torch.distributed as dist

from zerotrial.compat.deepspeed.names.accelerator import get_accelerator
from zerotrial.compat.deepspeed.names.utils import logger

__all__ = ["see_memory_usage", "set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: Of all of them.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:  # noqa: FBT001, FBT002 - DeepSpeed's
    """Log on rank 0 how many bytes its device, or on a CPU its process, holds.

    Args:
        message: Stands before the figures.
        force: False: log nothing, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    accelerator = get_accelerator()
    held, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    logger.log(
        logging.INFO, "%s: %.2f GiB held, %.2f GiB at most", message, held / 2**30, most / 2**30
    )
