"""``deepspeed.runtime.utils``."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zerotrial.extensions.deepspeed_api.names.accelerator import get_accelerator
from zerotrial.extensions.deepspeed_api.names.utils import logger

__all__ = ["move_to_device", "see_memory_usage", "set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: Of all of them.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:  # noqa: FBT001, FBT002 - DeepSpeed's
    """Log rank 0's memory use: of its device, or of its process on a CPU.

    Args:
        message: Prefix of the log line.
        force: False: log nothing, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    accelerator = get_accelerator()
    allocated, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    logger.log(
        logging.INFO,
        "%s: %.2f GiB held, %.2f GiB at most",
        message,
        allocated / 2**30,
        peak / 2**30,
    )


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Move the tensors in lists, tuples and dicts to a device.

    Args:
        item: A tensor, or containers of them.
        device: Their new device.
        criterion_func: Tensors for which it is true stay the same objects with moved values.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device)
        return item
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(v, device, criterion_func) for key, v in item.items()}
    return item.to(device)
