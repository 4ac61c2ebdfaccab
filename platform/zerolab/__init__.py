"""The control plane of Zerolab: what to train, where and when.

Importing this package loads neither torch nor a web framework nor a database driver.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.client import Client as Client

__version__ = "0.1.0"

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python client when it is first used."""
    if name == "Client":
        from zerolab.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
