"""The launchers that there are: a new one is one file, and one line here.

One whose slots are those of a cluster is made from a file, which needs a second line.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError
from zerolab.launcher.interface import Launcher, MakeLauncher
from zerolab.launcher.local import LocalLauncher
from zerolab.launcher.slurm.launcher import SlurmLauncher
from zerolab.launcher.ssh import SshLauncher
from zerolab.paths import Home

__all__ = ["LAUNCHERS", "MANAGED", "launcher_of_file"]

LAUNCHERS: dict[str, MakeLauncher] = {
    "local": LocalLauncher,
    "slurm": SlurmLauncher,
    "ssh": SshLauncher,
}
"""What ``zerolab agent start --launcher`` may be. ``ssh`` also starts those runs of a ``local``
agent that name machines of a hostfile."""

MANAGED: dict[str, Callable[[Home, Path], Launcher]] = {
    "slurm": SlurmLauncher.of_file,
}
"""What ``resource_manager.type`` may be, in the file of ``--resource-manager``."""


def launcher_of_file(home: Home, path: Path) -> Launcher:
    """Make the launcher of which a file says how runs become jobs.

    Args:
        home: Data directory of the agent.
        path: The file.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    content = read_yaml(path)
    block: Any = content.get("resource_manager", content)
    kind = block.get("type") if isinstance(block, dict) else block
    if kind not in MANAGED:
        problem = f"resource_manager.type: must be {' or '.join(MANAGED)}, got {kind!r}"
        raise ConfigError(str(path), [problem])
    return MANAGED[kind](home, path)
