"""A replacement for the package ``determined``, so that its trials and scripts run unchanged.

The directory ``stand_in`` has a package ``determined`` whose names are built on Zerolab. In an
experiment, ``environment: {determined: zerolab}`` puts it into the module search path. For other
scripts, ``python -m zerotrial.compat.determined`` prints the directory for ``PYTHONPATH``.
"""

import importlib.util
import os
import sys
from pathlib import Path

from zerolab.errors import ConfigError

__all__ = ["DIRECTORY", "install"]

DIRECTORY = Path(__file__).parent / "stand_in"
"""Directory of the package ``determined``."""


def install() -> None:
    """Let this process and its children import the replacement; a second call does nothing.

    Raises:
        ConfigError: If Determined itself is installed.
    """
    path = str(DIRECTORY)
    if path in sys.path:
        return
    spec = importlib.util.find_spec("determined")
    if spec is not None:
        problem = (
            f"determined: must not be installed where Zerolab replaces it, found {spec.origin}"
        )
        raise ConfigError("environment.determined", [f"{problem}; uninstall it"])
    sys.path.append(path)
    existing = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path if not existing else f"{existing}{os.pathsep}{path}"
