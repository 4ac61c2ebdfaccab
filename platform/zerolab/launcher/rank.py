"""A rank that runs a command: ``python -m zerolab.launcher.rank PARENT FOLDER -- COMMAND``.

It saves its process id, ties its life to the launcher's, and becomes the command. It imports very
little because a Python starts for every rank: the launcher passes the settings as options.
"""

import os
import sys
from pathlib import Path

from zerolab.parent import die_with_parent

__all__ = ["announce_rank", "main"]


def announce_rank(parent: int, ranks: Path) -> None:
    """Save this process's id as that of its rank, and tie it to its launcher.

    Args:
        parent: Process id of the launcher.
        ranks: Directory of the run with a file for each rank.
    """
    die_with_parent(parent)
    file = ranks / os.environ["RANK"]
    file.touch(0o600)
    file.write_text(f"{os.getpid()}\n", encoding="ascii")


def main() -> None:
    """Become the command after ``--``.

    ``--hide=NAME`` hides a variable from it. ``--local-rank-at=N`` inserts ``--local_rank`` before
    its N-th word. ``--slots=N`` gives it N of the machine's slots. ``--bind-cores=0,1,2,3`` binds
    it to its part of these CPU cores, or of all cores if the list is empty.
    """
    arguments = sys.argv[1:]
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    first, command = arguments[:dashes], arguments[dashes + 1 :]
    if len(first) < 2 or not first[0].isdecimal() or not command:
        sys.exit("usage: python -m zerolab.launcher.rank PARENT FOLDER [OPTIONS] -- COMMAND...")
    parent, ranks, *options = first
    announce_rank(int(parent), Path(ranks))
    _set_older_names()
    for option in options:
        name, _, value = option.partition("=")
        if name == "--hide":
            os.environ.pop(value, None)
        elif name == "--slots":
            _restrict_slots(int(value))
        elif name == "--bind-cores":
            _bind_cores([int(core) for core in value.split(",") if core])
        elif name == "--local-rank-at":
            command.insert(int(value), f"--local_rank={os.environ['LOCAL_RANK']}")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"entrypoint: {command[0]!r} cannot be started: {error.strerror}")


def _restrict_slots(number: int) -> None:
    """Confine this rank to its part of the slots of the machine's ranks."""
    first = int(os.environ["LOCAL_RANK"]) * number
    devices = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + number])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(int(threads) * number)


def _bind_cores(cores: list[int]) -> None:
    """Confine this rank to its part of the CPU cores, with as many threads."""
    usable = sorted(os.sched_getaffinity(0))
    missing = sorted(set(cores) - set(usable))
    if missing:
        sys.exit(f"--bind_core_list: this process may use the cores {usable}, got {missing}")
    chosen = cores or usable
    ranks, rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    count = len(chosen) // ranks
    if count < 1:
        problem = f"needs at least a core for each of {ranks} ranks, got {len(chosen)}"
        sys.exit(f"--bind_cores_to_rank: {problem}; use fewer ranks or leave it out")
    os.sched_setaffinity(0, chosen[rank * count : (rank + 1) * count])
    os.environ["OMP_NUM_THREADS"] = str(count)


def _set_older_names() -> None:
    """Set the additional variables of DeepSpeed's launcher."""
    names = {
        "LOCAL_SIZE": "LOCAL_WORLD_SIZE",
        "CROSS_RANK": "GROUP_RANK",
        "CROSS_SIZE": "GROUP_WORLD_SIZE",
    }
    for name, same in names.items():
        if same in os.environ:
            os.environ.setdefault(name, os.environ[same])


if __name__ == "__main__":
    main()
