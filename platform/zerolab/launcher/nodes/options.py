"""From the options of ``zerolab launch``, and the files that they name, to a plan."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerolab.contract.spec import ENV_AS_DEEPSPEED, Command, Nodes, RunSpec
from zerolab.errors import ConfigError
from zerolab.launcher.nodes.accelerate import Accelerate, read_accelerate
from zerolab.launcher.nodes.environment import exported, sent_variables
from zerolab.launcher.nodes.head import DEFAULT_PORT, Place, Plan
from zerolab.launcher.nodes.places import Wanted, choose_places

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
    given = read_accelerate(options.config_file) if options.config_file else Accelerate()
    wanted = _with_file(options.wanted, given)
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
        counted = None if wanted.hostfile else wanted.num_gpus
        places = choose_places(wanted, find_slots(counted, cpu), force_ssh=options.force_multi)
    sent = given.environment | sent_variables(Path.cwd())
    unused = given.unused
    if options.as_deepspeed:
        sent |= given.engine | {ENV_AS_DEEPSPEED: os.environ.get(ENV_AS_DEEPSPEED) or "1"}
    else:
        unused = sorted([*unused, *given.about_engine])
    plan = Plan(
        places=places,
        run=_run_of(make_command(options), Path.cwd(), options.grace_s),
        environment=exported(os.environ) | sent,
        address=address,
        port=port,
        alone=alone,
        python=options.python,
        ssh_config=options.ssh_config,
        ssh_port=options.ssh_port,
        silence_s=options.silence_s,
    )
    notes = []
    if unused:
        notes.append(f"{options.config_file}: without effect here: {', '.join(unused)}")
    if given.engine and not options.as_deepspeed:
        notes.append("--as-deepspeed has Accelerate use this engine, as that file says")
    return plan, notes


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
    return Command((*words, *options.arguments), local_rank_at=at, plain=True)


def _with_file(wanted: Wanted, given: Accelerate) -> Wanted:
    """Fill in from accelerate's file what the command line does not say."""
    filtered = bool(wanted.include or wanted.exclude)
    hostfile = wanted.hostfile or (Path(given.hostfile) if given.hostfile else None)
    include = wanted.include if filtered else given.include
    exclude = wanted.exclude if filtered else given.exclude
    localhost = wanted.localhost or ("" if hostfile else given.slots)
    counts = not (include or exclude or localhost)
    return Wanted(
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        num_nodes=_said(wanted.num_nodes, given.nodes if counts and hostfile else None),
        num_gpus=_said(wanted.num_gpus, given.per_node if counts else None),
        localhost=localhost,
    )


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
    (place,) = choose_places(alone, find_slots(wanted.num_gpus, cpu), read_default=False)
    sizes = (len(place.slots),) * (count or 1)
    port = DEFAULT_PORT if port is None else port
    return [place], Nodes(sizes, rank or 0, address, port)
