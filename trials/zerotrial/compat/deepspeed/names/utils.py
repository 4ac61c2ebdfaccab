"""``deepspeed.utils``."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from zerotrial.compat.deepspeed.gathering import (
    LEAF,
    OnDevice,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
]

logger = logging.getLogger("zerotrial")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: The text.
        ranks: Which; None and -1 mean all.
        level: Of :mod:`logging`.
    """
    mine = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or mine in ranks:
        logger.log(level, "[rank %d] %s", mine, message)


def set_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any], **unused: Any) -> list[Any]:
    """Have stage 3 gather modules of some classes as one; before ``initialize``.

    Args:
        model: Whose modules.
        leaf_module_classes: Classes, or their names.
        unused: Not used.

    Returns:
        The modules found.
    """
    del unused
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes]
    found = [part for part in model.modules() if type(part).__name__ in names]
    for part in found:
        vars(part)[LEAF] = True
    return found


def unset_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any]) -> list[Any]:
    """Undo :func:`set_z3_leaf_modules`."""
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes]
    found = [part for part in model.modules() if type(part).__name__ in names]
    for part in found:
        vars(part).pop(LEAF, None)
    return found


class RepeatingLoader:
    """An iterator over a loader that begins again at its end, for ever.

    Args:
        loader: Anything that can be iterated over more than once.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
