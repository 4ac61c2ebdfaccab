"""The ZeRO engine: DeepSpeed's JSON and calls on plain torch; knows nothing of trials."""

import importlib
from typing import Any

_EXPORTS = {
    "initialize": "zerotrial.engine.builder.build",
    "Engine": "zerotrial.engine.engine",
    "model_in_files": "zerotrial.extensions.offload.mapped_files",
}
"""Public name -> module that defines it."""

__all__ = ["Engine", "initialize", "model_in_files"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        msg = f"module 'zerotrial.engine' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
