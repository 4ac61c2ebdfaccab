"""Pipeline parallelism: layers, partitioning, schedules, and the engine that runs them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrial.extensions.pipeline.engine import PipelineEngine
    from zerotrial.extensions.pipeline.layers import LayerSpec, TiedLayerSpec
    from zerotrial.extensions.pipeline.module import PipelineModule
    from zerotrial.extensions.pipeline.partitioning import partition
    from zerotrial.extensions.pipeline.topology import PipeDataParallelTopology, ProcessTopology

_EXPORTS = {
    "LayerSpec": "layers",
    "PipeDataParallelTopology": "topology",
    "PipelineEngine": "engine",
    "PipelineModule": "module",
    "ProcessTopology": "topology",
    "TiedLayerSpec": "layers",
    "partition": "partitioning",
}
"""Public name -> module that defines it."""

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
    if name not in _EXPORTS:
        msg = f"module 'zerotrial.extensions.pipeline' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value
