"""Determined's Core API without a scheduler."""

from typing import Any

from zerotrial.extensions.determined_api.core_api import (
    DistributedContext,
    PreemptMode,
    TensorboardMode,
)
from zerotrial.extensions.determined_api.missing import missing_name
from zerotrial.extensions.determined_api.unmanaged import (
    Config,
    close,
    context_of,
    init,
    init_context,
    url_reverse_webui_exp_view,
)

__all__ = [
    "Config",
    "DefaultConfig",
    "DistributedContext",
    "PreemptMode",
    "TensorboardMode",
    "UnmanagedConfig",
    "close",
    "init",
    "init_context",
    "url_reverse_webui_exp_view",
]

DefaultConfig = UnmanagedConfig = Config
_PARTS = frozenset({"train", "checkpoint", "preempt", "distributed", "info"})


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return context_of(name)
    return missing_name("determined.experimental.core_v2")(name)
