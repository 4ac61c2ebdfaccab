"""Options of DeepSpeed's launcher that differ here or have no effect, and replacements."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zerolab.errors import ConfigError

__all__ = ["DeepSpeedOptions", "parse_cores"]

_SSH = "ranks are started over ssh, which needs no other launcher; leave it out"
_LAUNCHERS = {
    "slurm": "in an allocation use `srun --ntasks-per-node=1 zerolab launch --no_ssh ...`, or a "
    "Slurm pool of the server (docs/how_to/launching.md)",
    "openmpi": _SSH,
    "mpich": _SSH,
    "mvapich": _SSH,
    "impi": _SSH,
    "jsrun": _SSH,
}


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options of the command line; empty if not set."""

    launcher: str = ""
    launcher_args: str = ""
    autotuning: str = ""
    comment: str = ""
    account: str = ""
    venv_script: str = ""

    def notes(self) -> list[str]:
        """Return notes about options without effect.

        Raises:
            ConfigError: With every unsupported option.
        """
        problems = []
        name = self.launcher.lower()
        if name not in {"", "pdsh", "ssh"}:
            remedy = _LAUNCHERS.get(name, _SSH)
            problems.append(f"--launcher: must be pdsh or ssh, got {self.launcher!r}; {remedy}")
        if self.launcher_args.strip():
            problem = f"--launcher_args: is not supported, got {self.launcher_args!r}"
            problems.append(f"{problem}; use --ssh-config or --ssh_port for options of ssh")
        if self.autotuning not in {"", "run", "tune"}:
            problems.append(f"--autotuning: must be run or tune, got {self.autotuning!r}")
        if self.venv_script:
            problem = f"--venv_script: is not supported, got {self.venv_script!r}"
            problems.append(f"{problem}; name the environment's interpreter with --python")
        if problems:
            raise ConfigError("zerolab launch", problems)
        unused = [name for name in ("comment", "account") if getattr(self, name)]
        return [f"--{name}: without effect: ranks are not started by srun" for name in unused]


def parse_cores(text: str) -> Sequence[int]:
    """Read a list of CPU cores such as ``1,3-5,7``.

    Raises:
        ConfigError: If it is invalid.

    Example:
        >>> parse_cores("1,3-5")
        [1, 3, 4, 5]
    """
    cores: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            problem = f"--bind_core_list: must look like 0,2-5, got {text!r}"
            raise ConfigError("zerolab launch", [problem])
        cores |= set(range(first, last + 1))
    return sorted(cores)
