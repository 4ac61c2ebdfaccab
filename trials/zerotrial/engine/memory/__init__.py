"""Memory of a rank: tensors in files, reuse of freed memory, and the estimate of an extension."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrial.extensions.planner.formulas import MemoryEstimate, estimate, every_choice

__all__ = ["MemoryEstimate", "estimate", "every_choice"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not an import statement: the engine works without the extension.
    return getattr(importlib.import_module("zerotrial.extensions.planner.formulas"), name)
