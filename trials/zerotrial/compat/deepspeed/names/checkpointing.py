"""``deepspeed.checkpointing``: torch's activation checkpointing."""

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

logger = logging.getLogger(__name__)

_configured = False


def configure(*unused: Any, **options: Any) -> None:
    """Take note, and say what has no effect: that stands in the engine file."""
    global _configured
    del unused
    asked = sorted(name for name, value in options.items() if value)
    if asked:
        logger.warning(
            "checkpointing.configure(): %s: no effect here; set activation_checkpointing in the "
            "engine file",
            ", ".join(asked),
        )
    _configured = True


def is_configured() -> bool:
    """Whether :func:`configure` has been called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function, and again in backward rather than to keep its activations."""
    return checkpoint_of_torch(function, *args, use_reentrant=False)
