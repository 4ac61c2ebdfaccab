"""httpx without its command line, whose imports (click, rich) are a quarter of a script's start."""

import sys

__all__ = ["httpx"]

if "httpx" not in sys.modules:  # httpx accepts that the module is missing
    sys.modules["httpx._main"] = None  # type: ignore[assignment]

import httpx

if sys.modules.get("httpx._main", httpx) is None:
    del sys.modules["httpx._main"]
