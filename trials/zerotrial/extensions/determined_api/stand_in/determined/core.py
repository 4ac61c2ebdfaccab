"""Determined's Core API."""

from zerolab.core.context import CheckpointContext, Context, PreemptContext, TrainContext
from zerotrial.extensions.determined_api.core_api import (
    DistributedContext,
    PreemptMode,
    TensorboardMode,
    init,
)
from zerotrial.extensions.determined_api.missing import missing_name

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "PreemptContext",
    "PreemptMode",
    "TensorboardMode",
    "TrainContext",
    "init",
]

__getattr__ = missing_name("determined.core")
