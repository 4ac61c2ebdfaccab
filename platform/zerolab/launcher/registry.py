"""Registry of the launchers; others are added as extensions.

A new launcher is one file and one entry point of the group ``zerolab.launchers``. The entry point
names a class or function that creates a launcher; a class with ``from_file`` can also be the
``resource_manager.type`` of a file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError
from zerolab.launcher.interface import Launcher, LauncherFactory
from zerolab.launcher.local import LocalLauncher
from zerolab.paths import Home
from zerolab.registry import Registry

__all__ = ["LAUNCHERS", "launcher_of_file", "managed_launchers"]


def _factory(loaded: Any) -> LauncherFactory:
    if not callable(loaded):
        raise TypeError(f"must be a class or function that makes a Launcher, got {loaded!r}")
    factory: LauncherFactory = loaded
    return factory


LAUNCHERS: Registry[LauncherFactory] = Registry(
    "zerolab.launchers",
    {
        "local": LocalLauncher,
    },
    _factory,
)
"""Values of ``zerolab agent start --launcher``. ``ssh`` also starts runs of a ``local`` agent that
have a hostfile."""


def managed_launchers() -> dict[str, Callable[[Home, Path], Launcher]]:
    """Return the factories of launchers from a file, by ``resource_manager.type``."""
    return {
        name: maker.from_file
        for name, maker in LAUNCHERS.loadable().items()
        if hasattr(maker, "from_file")
    }


def launcher_of_file(home: Home, path: Path) -> Launcher:
    """Create the launcher of a resource manager from its file.

    Args:
        home: Data directory of the agent.
        path: The file.

    Raises:
        ConfigError: With all problems of the file.
    """
    content = read_yaml(path)
    block: Any = content.get("resource_manager", content)
    kind = block.get("type") if isinstance(block, dict) else block
    managed = managed_launchers()
    if kind not in managed:
        problem = f"resource_manager.type: must be {' or '.join(managed)}, got {kind!r}"
        raise ConfigError(str(path), [LAUNCHERS.problem(str(kind)) or problem])
    return managed[kind](home, path)
