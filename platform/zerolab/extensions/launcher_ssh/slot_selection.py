"""Selection of a run's machines and slots, from a hostfile and options."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerolab.errors import ConfigError
from zerolab.extensions.hostfile import (
    combination_problems,
    filter_slots,
    parse_hostfile,
)
from zerolab.extensions.launcher_ssh.coordinator import MachineSlots

__all__ = ["DEFAULT_HOSTFILE", "SlotOptions", "choose_machines", "is_local_host", "parse_slots"]

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Default hostfile, used if it exists."""
ENV_HOSTFILE = "DLTS_HOSTFILE"
"""Variable with the path of a job's hostfile, set by a platform."""

_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class SlotOptions:
    """Options that choose machines and slots."""

    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    localhost: str = ""
    """Slots of this machine, e.g. ``0,2``; no hostfile is read."""


def choose_machines(
    slot_options: SlotOptions,
    own_slots: Sequence[int],
    *,
    force_ssh: bool = False,
    read_default: bool = True,
) -> list[MachineSlots]:
    """Choose the machines of a run and the slots on each.

    Args:
        slot_options: The options.
        own_slots: Slots of this machine, for runs without a hostfile.
        force_ssh: Reach this machine by ssh, too.
        read_default: Read :data:`DEFAULT_HOSTFILE` if no other one is named.

    Raises:
        ConfigError: If there is no such hostfile, host or slot, or options contradict each other.
    """
    if slot_options.localhost:
        return [_machine_with_slots(slot_options, own_slots)]
    file = slot_options.hostfile
    if file is None and read_default:
        file = _default_hostfile()
    if file is None:
        return [_local_machine(slot_options, own_slots)]
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(str(file), [f"hostfile: must be readable, got {reason}"]) from None
    chosen = filter_slots(
        parse_hostfile(text),
        slot_options.include,
        slot_options.exclude,
        slot_options.num_nodes,
        slot_options.num_gpus,
    )
    return [
        MachineSlots(host, slots, local=not force_ssh and is_local_host(host))
        for host, slots in chosen.items()
    ]


def _default_hostfile() -> Path | None:
    """Return the hostfile of the platform's job, if there is one.

    Raises:
        ConfigError: If the variable names a file that does not exist.
    """
    path_of_job = os.environ.get(ENV_HOSTFILE)
    if not path_of_job:
        return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.is_file() else None
    if not Path(path_of_job).is_file():
        problem = (
            f"{ENV_HOSTFILE}: must name a file, got {path_of_job}; unset it, or use --localhost"
        )
        raise ConfigError("hosts and slots", [problem])
    return Path(path_of_job)


def is_local_host(host: str) -> bool:
    """Return whether a name in a hostfile is this machine."""
    return host in (*_HERE, socket.gethostname(), socket.getfqdn())


def _local_machine(slot_options: SlotOptions, own_slots: Sequence[int]) -> MachineSlots:
    """Return this machine with the slots that the options choose."""
    problems = combination_problems(
        slot_options.include, slot_options.exclude, slot_options.num_nodes, slot_options.num_gpus
    )
    if problems:
        raise ConfigError("hosts and slots", problems)
    if slot_options.num_nodes is not None and slot_options.num_nodes != 1:
        problem = f"num_nodes: must be 1 without a hostfile, got {slot_options.num_nodes}"
        raise ConfigError("hosts and slots", [f"{problem}; name one with --hostfile"])
    if slot_options.num_gpus is not None and slot_options.num_gpus < 1:
        raise ConfigError(
            "hosts and slots", [f"num_gpus: must be at least 1, got {slot_options.num_gpus}"]
        )
    count = max(own_slots, default=0) + 1
    try:
        chosen = filter_slots({"localhost": count}, slot_options.include, slot_options.exclude)
    except ConfigError as error:
        lines = [f"{problem}; no hostfile was given or found" for problem in error.problems]
        raise ConfigError(error.source, lines) from None
    slots = [slot for slot in chosen["localhost"] if slot in own_slots]
    is_subset = ":" in slot_options.include and len(slots) < len(chosen["localhost"])
    if is_subset or not slots:  # e.g. if CUDA_VISIBLE_DEVICES hides some
        has = ", ".join(map(str, own_slots))
        problem = (
            f"this machine has the slots {has}, got {slot_options.include or slot_options.exclude}"
        )
        raise ConfigError("hosts and slots", [problem])
    return MachineSlots("localhost", slots[: slot_options.num_gpus], local=True)


def _machine_with_slots(slot_options: SlotOptions, own_slots: Sequence[int]) -> MachineSlots:
    conflicting = {
        "hostfile": slot_options.hostfile, "include": slot_options.include,
        "exclude": slot_options.exclude,
        "num_nodes": slot_options.num_nodes, "num_gpus": slot_options.num_gpus,
    }  # fmt: skip
    problems = [
        f"{name}: cannot be combined with --localhost"
        for name, value in conflicting.items()
        if value not in (None, "")
    ]
    slots = parse_slots("localhost", slot_options.localhost, own_slots, problems)
    if problems:
        raise ConfigError("hosts and slots", problems)
    return MachineSlots("localhost", slots, local=True)


def parse_slots(key: str, text: str, own_slots: Sequence[int], problems: list[str]) -> list[int]:
    """Parse ``0,2``; add slots that this machine lacks to ``problems``."""
    numbers = set()
    for word in text.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", word.strip()):
            problems.append(f"{key}: slots must be numbers with commas between them, got {word!r}")
        elif int(word) not in own_slots:
            has = ", ".join(map(str, own_slots))
            problems.append(f"{key}: this machine has the slots {has}, got {word.strip()}")
        else:
            numbers.add(int(word))
    return sorted(numbers)
