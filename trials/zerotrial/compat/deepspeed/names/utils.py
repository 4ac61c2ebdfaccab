"""``deepspeed.utils``."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zerotrial.compat.deepspeed.gathering import (
    LEAF,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
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

INSTEAD = {
    "groups": "there is no sequence or expert parallelism; ranks are torch.distributed's",
    "safe_get_local_grad": "call safe_get_full_grad",
    "safe_get_local_fp32_param": "call safe_get_full_fp32_param",
    "safe_get_local_optimizer_state": "call safe_get_full_optimizer_state",
    "zero_to_fp32": "call engine.export(path), or engine.full_state_dict()",
}
"""Names without a counterpart to what to do instead."""


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
