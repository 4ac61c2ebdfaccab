"""The control plane of Zerolab: what to train, where and when.

Importing this package loads neither torch nor a web framework nor a database driver.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
