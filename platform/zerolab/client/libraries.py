"""Optional libraries of the client, imported when they are needed."""

from importlib import import_module
from typing import Any

from zerolab.errors import ConfigError

__all__ = ["library"]


def library(name: str, purpose: str) -> Any:
    """Import an optional library.

    Args:
        name: Module, such as ``matplotlib.pyplot``.
        purpose: What needs it, for the error.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        missing = (error.name or package).partition(".")[0]
        if missing != package:  # it is installed, and one of its dependencies is not
            problem = f"{package}: cannot be imported: {error}"
            raise ConfigError(purpose, [problem]) from error
        problem = f"{package}: must be installed; run `pip install {package}`"
        raise ConfigError(purpose, [problem]) from None
