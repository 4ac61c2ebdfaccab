"""Determined's launchers, which run the command of one rank here."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Replace this process by the command that follows the launcher's options."""
    words = sys.argv[1:]
    start = next((at for at, word in enumerate(words) if _is_command(word)), None)
    if start is None:
        sys.exit("determined.launch: must get a command, such as `python3 train.py`")
    command = words[start:]
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    os.execvp(command[0], command)  # noqa: S606 - the user's command


def _is_command(word: str) -> bool:
    name = os.path.basename(word)  # noqa: PTH119 - a word
    return not word.startswith("-") and (name.startswith("python") or name.endswith((".py", ".sh")))
