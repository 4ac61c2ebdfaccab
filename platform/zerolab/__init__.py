"""The control plane of Zerolab: what to train, where and when.

Importing this package loads neither torch nor a web framework nor a database driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab import config as config
    from zerolab import core as core
    from zerolab import errors as errors
    from zerolab import searcher as searcher
    from zerolab.client import Client as Client

__version__ = "0.3.0"

__all__ = ["Client", "__version__"]


_MODULES = frozenset({"config", "core", "errors", "searcher"})
"""Public modules that ``import zerolab`` offers."""


def __getattr__(name: str) -> Any:
    """Import the Python client, or a public module, when it is first used."""
    if name == "Client":
        return import_module("zerolab.client").Client
    if name in _MODULES:
        return import_module(f"zerolab.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
