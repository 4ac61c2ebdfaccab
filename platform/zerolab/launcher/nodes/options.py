"""From the options of ``zerolab launch``, and the files that they name, to a plan."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zerolab.contract.spec import ENV_AS_DEEPSPEED, Command, Nodes, RunSpec
from zerolab.errors import ConfigError
from zerolab.launcher.deepspeed_options import DeepSpeedOptions, parse_cores
from zerolab.launcher.nodes.accelerate import Accelerate, read_accelerate
from zerolab.launcher.nodes.coordinator import DEFAULT_PORT, Place, Plan
from zerolab.launcher.nodes.environment import exported, sent_variables
from zerolab.launcher.nodes.slot_selection import Wanted, choose_places
from zerolab.schema.json_values import json_value_problems

__all__ = ["FindSlots", "LaunchOptions", "make_command", "make_plan"]

FindSlots = Callable[[int | None, bool], Sequence[int]]
"""Slots of this machine: how many (None for all), and whether CPU slots are meant."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """As the command line has them; what is left out is None, empty or false."""

    script: str
    arguments: Sequence[str] = ()
    wanted: Wanted
    address: str = ""
    port: int | None = None
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    config_file: Path | None = None
    ssh_config: Path | None = None
    ssh_port: int | None = None
    force_multi: bool = False
    no_ssh: bool = False
    node_rank: int | None = None
    python: str = ""
    grace_s: float = 30.0
    silence_s: float = 30.0
    cpu: bool = False
    as_deepspeed: bool = False
    bind_cores: bool = False
    core_list: str = ""
    of_deepspeed: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)


def make_plan(options: LaunchOptions, find_slots: FindSlots) -> tuple[Plan, list[str]]:
    """Decide what runs where.

    Args:
        options: Of the command; they win over the file that they name.
        find_slots: Finds the slots of this machine.

    Returns:
        The plan, and what the user should know about it.

    Raises:
        ConfigError: If that is impossible.
    """
    notes = options.of_deepspeed.notes()
    given = read_accelerate(options.config_file) if options.config_file else Accelerate()
    wanted, unused_places = _with_file(options.wanted, given)
    address = options.address or given.address
    port = options.port if options.port is not None else given.port
    cpu = options.cpu or given.cpu
    # accelerate, unlike DeepSpeed, is started on every machine by hand.
    by_hand = options.config_file is not None and (given.nodes or 1) > 1 and not wanted.hostfile
    alone = None
    if options.no_ssh or options.node_rank is not None or by_hand:
        rank = options.node_rank if options.node_rank is not None else given.node_rank
        count = _said(options.wanted.num_nodes, given.nodes)
        places, alone = _one_of_several(wanted, count, rank, address, port, find_slots, cpu=cpu)
    else:
        if wanted.num_nodes is not None and not options.wanted.localhost:
            wanted = replace(wanted, localhost="")  # to be told of the number, not of gpu_ids
        own = _own_slots(wanted, find_slots, cpu=cpu)
        if given.slots and wanted.exclude and not wanted.hostfile:  # all but these, of those
            own = [slot for slot in own if str(slot) in given.slots.split(",")]
        places = choose_places(wanted, own, force_ssh=options.force_multi)
    sent = given.environment | sent_variables(Path.cwd())
    unused = sorted([*given.unused, *unused_places])
    if options.as_deepspeed:
        sent |= given.engine | {ENV_AS_DEEPSPEED: os.environ.get(ENV_AS_DEEPSPEED) or "1"}
    else:
        unused = sorted([*unused, *given.about_engine])
    command, environment = make_command(options), exported(os.environ) | sent
    _check_text(command, environment)
    plan = Plan(
        places=places,
        run=_run_of(command, Path.cwd(), options.grace_s),
        environment=environment,
        address=address,
        port=port,
        alone=alone,
        python=options.python,
        ssh_config=options.ssh_config,
        ssh_port=options.ssh_port,
        silence_s=options.silence_s,
    )
    if unused:
        notes.append(f"{options.config_file}: without effect here: {', '.join(unused)}")
    if given.engine and not options.as_deepspeed:
        notes.append("--as-deepspeed has Accelerate use this engine, as that file says")
    return plan, notes


def _own_slots(wanted: Wanted, find_slots: FindSlots, *, cpu: bool) -> Sequence[int]:
    """Find the slots of this machine; of CPU slots as many as the options count or name."""
    if wanted.hostfile:
        return find_slots(None, cpu)
    named = wanted.localhost or wanted.include.removeprefix("localhost:")
    numbers = [int(word) for word in named.split(",") if word.isdecimal() and len(word) < 4]
    if wanted.num_gpus is None and numbers:
        try:
            return find_slots(max(numbers) + 1, cpu)
        except ConfigError:  # there are not so many GPUs, which is told with those that there are
            return find_slots(None, cpu)
    return find_slots(wanted.num_gpus, cpu)


def _run_of(command: Command, directory: Path, grace_s: float) -> RunSpec:
    """A run of no experiment."""
    return RunSpec(
        experiment_id=0,
        trial_id=0,
        run_id=0,
        config={},
        hparams={},
        entrypoint=command,
        trial_seed=0,
        slots=0,
        grace_s=grace_s,
        model_dir=str(directory),
        run_dir="",
        checkpoint_dir="",
    )


def make_command(options: LaunchOptions) -> Command:
    """What every rank runs.

    Raises:
        ConfigError: If it cannot be both a module and a program.
    """
    if options.module and options.no_python:
        problem = "module, no_python: only one of them may be given"
        raise ConfigError("script", [problem])
    if options.no_python:
        words = [options.script]
    elif options.module:
        words = [options.python or sys.executable, "-u", "-m", options.script]
    else:
        words = [options.python or sys.executable, "-u", options.script]
    # accelerate's launcher, whose file that is, adds no argument.
    at = None if options.no_local_rank or options.config_file else len(words)
    cores = None
    if options.bind_cores or options.core_list:
        cores = tuple(parse_cores(options.core_list)) if options.core_list else ()
    return Command((*words, *options.arguments), local_rank_at=at, plain=True, cores=cores)


def _check_text(command: Command, environment: Mapping[str, str]) -> None:
    """Refuse what a message to the machines cannot hold."""
    words, folder = list(command.words), str(Path.cwd())
    problems = json_value_problems(
        {"command": words, "directory": folder, "variables": environment}
    )
    if problems:
        raise ConfigError("script", problems)


def _with_file(wanted: Wanted, given: Accelerate) -> tuple[Wanted, list[str]]:
    """Fill in from accelerate's file what the command line does not say.

    Returns:
        What is wanted, and keys of the file that have no effect beside the options.

    Raises:
        ConfigError: If more slots are wanted than the file names.
    """
    if wanted.localhost:
        return wanted, []
    filtered = bool(wanted.include or wanted.exclude)
    counted = wanted.num_nodes is not None or wanted.num_gpus is not None
    if not filtered and not counted:
        wanted = replace(wanted, include=given.include, exclude=given.exclude)
    if wanted.hostfile is not None:  # it says which machines there are, and how large
        others = {
            "num_machines": given.nodes not in {None, 1},
            "num_processes": given.per_node is not None,
            "gpu_ids": bool(given.slots),
        }
        return wanted, [name for name, said in others.items() if said]
    if given.hostfile:
        wanted = replace(wanted, hostfile=Path(given.hostfile))
    elif given.slots and not filtered:
        slots = given.slots.split(",")
        count = len(slots) if wanted.num_gpus is None else wanted.num_gpus
        if not 1 <= count <= len(slots):
            told = f"must be 1 to {len(slots)}, as many as gpu_ids of the file names"
            raise ConfigError("hosts and slots", [f"num_gpus: {told}, got {count}"])
        nodes = None if wanted.num_nodes == 1 else wanted.num_nodes
        here = ",".join(slots[:count])
        return replace(wanted, localhost=here, num_gpus=None, num_nodes=nodes), []
    if wanted.include or wanted.exclude:
        return wanted, []
    nodes = _said(wanted.num_nodes, given.nodes if wanted.hostfile else None)
    return replace(wanted, num_nodes=nodes, num_gpus=_said(wanted.num_gpus, given.per_node)), []


def _said(number: int | None, otherwise: int | None) -> int | None:
    """A number of the command line, or that of a file; 0 was said, too, and is refused later."""
    return otherwise if number is None else number


def _one_of_several(  # noqa: PLR0917 - what one of several heads is told
    wanted: Wanted,
    count: int | None,
    rank: int | None,
    address: str,
    port: int | None,
    find_slots: FindSlots,
    *,
    cpu: bool,
) -> tuple[list[Place], Nodes]:
    """This machine as one of several, each of which is started by itself, with as many slots."""
    problems = []
    if count is None or count < 1:
        problems.append("num_nodes: must say how many machines there are")
    if rank is None or not 0 <= rank < (count or rank + 1):
        problems.append(f"node_rank: must be 0 to num_nodes - 1, got {rank}")
    if not address:
        problems.append("master_addr: must be the address of the machine of node rank 0")
    if wanted.hostfile or wanted.include or wanted.exclude:
        problems.append("no_ssh: hostfile, include and exclude are for a start over ssh")
    if problems:
        raise ConfigError("one node of several", problems)
    alone = Wanted(num_gpus=wanted.num_gpus, localhost=wanted.localhost)
    own = _own_slots(alone, find_slots, cpu=cpu)
    (place,) = choose_places(alone, own, read_default=False)
    sizes = (len(place.slots),) * (count or 1)
    port = DEFAULT_PORT if port is None else port
    return [place], Nodes(sizes, rank or 0, address, port)
