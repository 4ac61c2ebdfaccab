"""One rank that is a command: ``python -m zerolab.launcher.rank PARENT FOLDER -- COMMAND``.

It notes its process id, asks to die with the launcher, and becomes the command. It imports next to
nothing, since a Python starts for every such rank: the launcher says what stands in its contract.
"""

import os
import sys
from pathlib import Path

from zerolab.parent import die_with_parent

__all__ = ["announce_rank", "main"]


def announce_rank(parent: int, ranks: Path) -> None:
    """Note this process as the rank that its environment names, and tie it to its launcher.

    Args:
        parent: Process id of the launcher.
        ranks: Folder of the run that has a file for each rank.
    """
    die_with_parent(parent)
    file = ranks / os.environ["RANK"]
    file.touch(0o600)
    file.write_text(f"{os.getpid()}\n", encoding="ascii")


def main() -> None:
    """Become the command behind ``--``.

    With ``--hide=NAME`` it does not see that variable; ``--local-rank-at=N`` puts ``--local_rank``
    in front of its N-th word; with ``--slots=N`` it has N of its machine's slots; with
    ``--bind-cores=0,1,2,3`` it runs on its own part of these CPU cores, of all when none is named.
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
            _take_slots(int(value))
        elif name == "--bind-cores":
            _bind_cores([int(core) for core in value.split(",") if core])
        elif name == "--local-rank-at":
            command.insert(int(value), f"--local_rank={os.environ['LOCAL_RANK']}")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"entrypoint: {command[0]!r} cannot be started: {error.strerror}")


def _take_slots(number: int) -> None:
    """Confine this rank to its own part of the slots that all ranks of its machine have."""
    first = int(os.environ["LOCAL_RANK"]) * number
    devices = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + number])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(int(threads) * number)


def _bind_cores(cores: list[int]) -> None:
    """Confine this rank to its own part of the CPU cores, and its threads to as many."""
    usable = sorted(os.sched_getaffinity(0))
    missing = sorted(set(cores) - set(usable))
    if missing:
        sys.exit(f"--bind_core_list: this process may use the cores {usable}, got {missing}")
    chosen = cores or usable
    ranks, rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    count = len(chosen) // ranks
    if count < 1:
        told = f"needs at least a core for each of {ranks} ranks, got {len(chosen)}"
        sys.exit(f"--bind_cores_to_rank: {told}; use fewer ranks or leave it out")
    os.sched_setaffinity(0, chosen[rank * count : (rank + 1) * count])
    os.environ["OMP_NUM_THREADS"] = str(count)


def _set_older_names() -> None:
    """Set the variables that DeepSpeed's launcher sets besides torch's."""
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
