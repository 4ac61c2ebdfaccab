"""From a hostfile and the options of ``zerolab launch`` to the machines and slots of a run."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerolab.errors import ConfigError
from zerolab.launcher.hostfile import combination_problems, filter_slots, parse_hostfile
from zerolab.launcher.nodes.coordinator import Place

__all__ = ["DEFAULT_HOSTFILE", "Wanted", "choose_places", "is_here", "parse_slots"]

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Read when it is there and no other one is named."""
ENV_HOSTFILE = "DLTS_HOSTFILE"
"""Variable in which a platform names the hostfile of a job."""

_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Wanted:
    """Options that choose machines and slots."""

    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    localhost: str = ""
    """Slots of this machine, ``0,2``: no hostfile is read."""


def choose_places(
    wanted: Wanted, own_slots: Sequence[int], *, force_ssh: bool = False, read_default: bool = True
) -> list[Place]:
    """Choose the machines of a run and the slots on each.

    Args:
        wanted: The options.
        own_slots: Slots of this machine, for runs without a hostfile.
        force_ssh: Reach this machine by ssh, too.
        read_default: Read :data:`DEFAULT_HOSTFILE` where no other one is named.

    Raises:
        ConfigError: If there is no such hostfile, host or slot, or options contradict each other.
    """
    if wanted.localhost:
        return [_chosen_here(wanted, own_slots)]
    file = wanted.hostfile
    if file is None and read_default:
        file = _default_hostfile()
    if file is None:
        return [_here(wanted, own_slots)]
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(str(file), [f"hostfile: must be readable, got {why}"]) from None
    chosen = filter_slots(
        parse_hostfile(text), wanted.include, wanted.exclude, wanted.num_nodes, wanted.num_gpus
    )
    return [
        Place(host, slots, local=not force_ssh and is_here(host)) for host, slots in chosen.items()
    ]


def _default_hostfile() -> Path | None:
    """Return the hostfile of the platform's job, if there is one.

    Raises:
        ConfigError: If the variable names a file that does not exist.
    """
    named = os.environ.get(ENV_HOSTFILE)
    if not named:
        return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.is_file() else None
    if not Path(named).is_file():
        problem = f"{ENV_HOSTFILE}: must name a file, got {named}; unset it, or use --localhost"
        raise ConfigError("hosts and slots", [problem])
    return Path(named)


def is_here(host: str) -> bool:
    """Whether a name in a hostfile is this machine's own."""
    return host in (*_HERE, socket.gethostname(), socket.getfqdn())


def _here(wanted: Wanted, own_slots: Sequence[int]) -> Place:
    """All that is asked of a run on this machine alone."""
    problems = combination_problems(
        wanted.include, wanted.exclude, wanted.num_nodes, wanted.num_gpus
    )
    if problems:
        raise ConfigError("hosts and slots", problems)
    if wanted.num_nodes is not None and wanted.num_nodes != 1:
        problem = f"num_nodes: must be 1 without a hostfile, got {wanted.num_nodes}"
        raise ConfigError("hosts and slots", [f"{problem}; name one with --hostfile"])
    if wanted.num_gpus is not None and wanted.num_gpus < 1:
        raise ConfigError(
            "hosts and slots", [f"num_gpus: must be at least 1, got {wanted.num_gpus}"]
        )
    count = max(own_slots, default=0) + 1
    try:
        chosen = filter_slots({"localhost": count}, wanted.include, wanted.exclude)
    except ConfigError as error:
        told = [f"{problem}; no hostfile was given or found" for problem in error.problems]
        raise ConfigError(error.source, told) from None
    slots = [slot for slot in chosen["localhost"] if slot in own_slots]
    named = ":" in wanted.include and len(slots) < len(chosen["localhost"])
    if named or not slots:  # as where CUDA_VISIBLE_DEVICES leaves some out
        has = ", ".join(map(str, own_slots))
        problem = f"this machine has the slots {has}, got {wanted.include or wanted.exclude}"
        raise ConfigError("hosts and slots", [problem])
    return Place("localhost", slots[: wanted.num_gpus], local=True)


def _chosen_here(wanted: Wanted, own_slots: Sequence[int]) -> Place:
    others = {
        "hostfile": wanted.hostfile, "include": wanted.include, "exclude": wanted.exclude,
        "num_nodes": wanted.num_nodes, "num_gpus": wanted.num_gpus,
    }  # fmt: skip
    problems = [
        f"{name}: cannot be combined with --localhost"
        for name, value in others.items()
        if value not in (None, "")
    ]
    slots = parse_slots("localhost", wanted.localhost, own_slots, problems)
    if problems:
        raise ConfigError("hosts and slots", problems)
    return Place("localhost", slots, local=True)


def parse_slots(key: str, text: str, own_slots: Sequence[int], problems: list[str]) -> list[int]:
    """Read ``0,2``; what is no slot of this machine goes to ``problems``."""
    found = set()
    for word in text.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", word.strip()):
            problems.append(f"{key}: slots must be numbers with commas between them, got {word!r}")
        elif int(word) not in own_slots:
            has = ", ".join(map(str, own_slots))
            problems.append(f"{key}: this machine has the slots {has}, got {word.strip()}")
        else:
            found.add(int(word))
    return sorted(found)
