"""``deepspeed.checkpointing``: activation checkpointing through ``torch.utils.checkpoint``."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

logger = logging.getLogger(__name__)

_configured = False


def configure(  # noqa: PLR0917 - DeepSpeed's arguments, in its order
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,  # noqa: FBT001
    contiguous_checkpointing: bool | None = None,  # noqa: FBT001
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,  # noqa: FBT001
    synchronize: bool | None = None,  # noqa: FBT001
    profile: bool | None = None,  # noqa: FBT001
) -> None:
    """Warn about arguments without effect, which belong in the engine file.

    Args:
        mpu_: Ignored: the engine knows its tensor-parallel ranks.
        deepspeed_config: Not read: the engine reads its own.
        partition_activations: False.
        contiguous_checkpointing: False.
        num_checkpoints: 0.
        checkpoint_in_cpu: False.
        synchronize: False.
        profile: False.
    """
    global _configured
    options = {
        "deepspeed_config": deepspeed_config is not None,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    if any(options.values()):
        logger.warning(
            "checkpointing.configure(): %s: no effect here; set activation_checkpointing in the "
            "engine file",
            ", ".join(name for name, value in options.items() if value),
        )
    _configured = True


def is_configured() -> bool:
    """Whether :func:`configure` has been called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute a function in backward instead of keeping its activations.

    Dropout draws the same values again: the state of the random generators is restored.

    Args:
        function: Called with ``args`` and ``kwargs``.
        args: Its arguments.
        kwargs: Its arguments by name; torch's ``use_reentrant`` is accepted and has no effect.
    """
    kwargs.pop("use_reentrant", None)
    call = functools.partial(function, **kwargs) if kwargs else function
    return checkpoint_of_torch(call, *args, use_reentrant=False)
