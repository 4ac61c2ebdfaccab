"""Public import path of `zerotrial.extensions.pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrial.extensions.pipeline import (
        LayerSpec,
        PipeDataParallelTopology,
        PipelineEngine,
        PipelineModule,
        ProcessTopology,
        TiedLayerSpec,
        partition,
    )

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not an import statement: the engine works without the extension.
    return getattr(importlib.import_module("zerotrial.extensions.pipeline"), name)
