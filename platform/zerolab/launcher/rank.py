"""One rank that is a command of the user's: ``python -m zerolab.launcher.rank PARENT -- COMMAND``.

It notes its process id, asks to die with the launcher, and becomes the command.
"""

import os
import sys
from pathlib import Path

from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_RUN_SPEC
from zerolab.linux import die_with_parent

__all__ = ["announce_rank", "main"]


def announce_rank(parent: int) -> None:
    """Note this process as the rank that its environment names, and tie it to its launcher.

    Args:
        parent: Process id of the launcher.
    """
    die_with_parent(parent)
    folder = RunFolder(Path(os.environ[ENV_RUN_SPEC]).parent)
    file = folder.ranks / os.environ["RANK"]
    file.touch(0o600)
    file.write_text(f"{os.getpid()}\n", encoding="ascii")


def main() -> None:
    """Become the command behind ``--``."""
    parent, dashes, *command = sys.argv[1:]
    if dashes != "--" or not command:
        sys.exit("usage: python -m zerolab.launcher.rank PARENT -- COMMAND...")
    announce_rank(int(parent))
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"entrypoint: {command[0]!r} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
