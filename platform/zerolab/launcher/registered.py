"""The launchers that there are: a new one is one file, and one line here."""

from zerolab.launcher.interface import MakeLauncher
from zerolab.launcher.local import LocalLauncher
from zerolab.launcher.slurm.launcher import SlurmLauncher

__all__ = ["LAUNCHERS"]

LAUNCHERS: dict[str, MakeLauncher] = {
    "local": LocalLauncher,
    "slurm": SlurmLauncher,
}
"""What ``zerolab agent start --launcher`` may be."""
