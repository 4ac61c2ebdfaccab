"""``deepspeed.launcher.runner``."""

import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerolab.launcher.hostfile import filter_slots, parse_hostfile

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "fetch_hostfile",
    "main",
    "parse_inclusion_exclusion",
]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""DeepSpeed's prefixes of variables for other machines; ``zerolab launch`` does not read it."""

logger = logging.getLogger("zerotrial")


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Read a hostfile.

    Args:
        hostfile_path: Lines of ``HOST slots=N``.

    Returns:
        Host to its number of slots; None, with a warning, if there is no such file.

    Raises:
        ConfigError: For lines that are no entries.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("hostfile %s: not found; only this machine is used", hostfile_path)
        return None
    return parse_hostfile(path.read_text(encoding="utf-8"))


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int]]:
    """Choose slots of hosts.

    Args:
        resource_pool: As :func:`fetch_hostfile` returns it.
        inclusion: Such as ``worker-0@worker-1:0,2``; empty for all.
        exclusion: In the same form; empty for none.

    Returns:
        Host to its slots.

    Raises:
        ConfigError: For both filters at once, unknown hosts or slots, or if nothing is left.
    """
    return filter_slots(resource_pool, inclusion, exclusion)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``zerolab launch --as-deepspeed`` with the arguments of DeepSpeed's launcher.

    Args:
        args: Options, then the script and its arguments; those of this process by default.

    Raises:
        SystemExit: With the launcher's exit code, unless it is 0.
    """
    arguments = sys.argv[1:] if args is None else args
    command = [sys.executable, "-m", "zerolab", "launch", "--as-deepspeed", *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
