"""Memory of a rank: estimate, tensors in files, reuse of freed memory."""

from zerotrial.engine.memory.formulas import (
    DEFAULT_BUCKET_NUMEL,
    MOMENTS,
    WHOLE,
    Device,
    DTypeName,
    MemoryEstimate,
    Place,
    estimate,
    every_choice,
)

__all__ = [
    "DEFAULT_BUCKET_NUMEL",
    "MOMENTS",
    "WHOLE",
    "DTypeName",
    "Device",
    "MemoryEstimate",
    "Place",
    "estimate",
    "every_choice",
]
