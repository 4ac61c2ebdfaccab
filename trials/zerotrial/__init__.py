"""What runs inside a trial's processes: the trial API, the controller, and the ZeRO engine.

Names are imported when first used, so that ``import zerotrial`` costs nothing.
"""

import importlib
from typing import Any

_EXPORTS = {
    "initialize": "zerotrial.engine.build",
}
"""Public name -> module that defines it."""

__all__ = ["initialize"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        msg = f"module 'zerotrial' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
