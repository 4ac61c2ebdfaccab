"""Conversion of the options of ``zerolab launch`` and their files to a launch plan."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zerolab.contract.spec import ENV_AS_DEEPSPEED, Command, Nodes, RunSpec
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_ssh.coordinator import DEFAULT_PORT, LaunchPlan, MachineSlots
from zerolab.extensions.launcher_ssh.environment import exported_variables, sent_variables
from zerolab.extensions.launcher_ssh.other_launchers.accelerate import (
    AccelerateConfig,
    read_accelerate,
)
from zerolab.extensions.launcher_ssh.other_launchers.deepspeed_options import (
    DeepSpeedOptions,
    parse_cores,
)
from zerolab.extensions.launcher_ssh.slot_selection import SlotOptions, choose_machines
from zerolab.schema.json_values import json_value_problems

__all__ = ["FindSlots", "LaunchOptions", "make_command", "make_plan"]

FindSlots = Callable[[int | None, bool], Sequence[int]]
"""Function that finds slots of this machine: their number (None for all), and whether to use CPU
slots."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of the command line; omitted ones are None, empty or false."""

    script: str
    arguments: Sequence[str] = ()
    slot_options: SlotOptions
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


def make_plan(options: LaunchOptions, find_slots: FindSlots) -> tuple[LaunchPlan, list[str]]:
    """Create the launch plan.

    Args:
        options: Options of the command; they override the file that they name.
        find_slots: Finds the slots of this machine.

    Returns:
        The plan, and notes for the user.

    Raises:
        ConfigError: If the options are invalid.
    """
    notes = options.of_deepspeed.notes()
    file_settings = (
        read_accelerate(options.config_file) if options.config_file else AccelerateConfig()
    )
    slot_options, unused_places = _with_file(options.slot_options, file_settings)
    address = options.address or file_settings.address
    port = options.port if options.port is not None else file_settings.port
    cpu = options.cpu or file_settings.cpu
    # Users start accelerate on every machine, unlike DeepSpeed.
    by_hand = (
        options.config_file is not None
        and (file_settings.nodes or 1) > 1
        and not slot_options.hostfile
    )
    nodes = None
    if options.no_ssh or options.node_rank is not None or by_hand:
        rank = options.node_rank if options.node_rank is not None else file_settings.node_rank
        count = _first_set(options.slot_options.num_nodes, file_settings.nodes)
        places, nodes = _one_of_several(
            slot_options, count, rank, address, port, find_slots, cpu=cpu
        )
    else:
        if slot_options.num_nodes is not None and not options.slot_options.localhost:
            slot_options = replace(
                slot_options, localhost=""
            )  # the error is then about the number, not gpu_ids
        local_slots = _local_slots(slot_options, find_slots, cpu=cpu)
        if (
            file_settings.slots and slot_options.exclude and not slot_options.hostfile
        ):  # exclude from the file's slots
            local_slots = [
                slot for slot in local_slots if str(slot) in file_settings.slots.split(",")
            ]
        places = choose_machines(slot_options, local_slots, force_ssh=options.force_multi)
    sent = file_settings.environment | sent_variables(Path.cwd())
    unused = sorted([*file_settings.unused, *unused_places])
    if options.as_deepspeed:
        sent |= file_settings.engine | {ENV_AS_DEEPSPEED: os.environ.get(ENV_AS_DEEPSPEED) or "1"}
    else:
        unused = sorted([*unused, *file_settings.about_engine])
    command, environment = make_command(options), exported_variables(os.environ) | sent
    _check_text(command, environment)
    plan = LaunchPlan(
        places=places,
        run=_run_spec(command, Path.cwd(), options.grace_s),
        environment=environment,
        address=address,
        port=port,
        nodes=nodes,
        python=options.python,
        ssh_config=options.ssh_config,
        ssh_port=options.ssh_port,
        silence_s=options.silence_s,
    )
    if unused:
        notes.append(f"{options.config_file}: without effect here: {', '.join(unused)}")
    if file_settings.engine and not options.as_deepspeed:
        notes.append("--as-deepspeed has AccelerateConfig use this engine, as that file says")
    return plan, notes


def _local_slots(slot_options: SlotOptions, find_slots: FindSlots, *, cpu: bool) -> Sequence[int]:
    """Find the slots of this machine; CPU slots as many as the options count or name."""
    if slot_options.hostfile:
        return find_slots(None, cpu)
    slot_list = slot_options.localhost or slot_options.include.removeprefix("localhost:")
    numbers = [int(word) for word in slot_list.split(",") if word.isdecimal() and len(word) < 4]
    if slot_options.num_gpus is None and numbers:
        try:
            return find_slots(max(numbers) + 1, cpu)
        except ConfigError:  # too few GPUs: a later error lists the existing ones
            return find_slots(None, cpu)
    return find_slots(slot_options.num_gpus, cpu)


def _run_spec(command: Command, directory: Path, grace_s: float) -> RunSpec:
    """Return the run specification of a command outside of experiments."""
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
    """Return the command of every rank.

    Raises:
        ConfigError: If it cannot be both a module and a program.
    """
    if options.module and options.no_python:
        problem = "module, no_python: only one of them may be given"
        raise ConfigError("script", [problem])
    if options.no_python:
        arguments = [options.script]
    elif options.module:
        arguments = [options.python or sys.executable, "-u", "-m", options.script]
    else:
        arguments = [options.python or sys.executable, "-u", options.script]
    # accelerate's launcher adds no argument.
    position = None if options.no_local_rank or options.config_file else len(arguments)
    cores = None
    if options.bind_cores or options.core_list:
        cores = tuple(parse_cores(options.core_list)) if options.core_list else ()
    return Command(
        (*arguments, *options.arguments), local_rank_at=position, plain=True, cores=cores
    )


def _check_text(command: Command, environment: Mapping[str, str]) -> None:
    """Reject text that a message to the machines cannot contain."""
    arguments, folder = list(command.words), str(Path.cwd())
    problems = json_value_problems(
        {"command": arguments, "directory": folder, "variables": environment}
    )
    if problems:
        raise ConfigError("script", problems)


def _with_file(
    slot_options: SlotOptions, file_settings: AccelerateConfig
) -> tuple[SlotOptions, list[str]]:
    """Fill in options that the command line lacks from accelerate's file.

    Returns:
        The options, and keys of the file that they override.

    Raises:
        ConfigError: If the options request more slots than the file names.
    """
    if slot_options.localhost:
        return slot_options, []
    filtered = bool(slot_options.include or slot_options.exclude)
    counted = slot_options.num_nodes is not None or slot_options.num_gpus is not None
    if not filtered and not counted:
        slot_options = replace(
            slot_options, include=file_settings.include, exclude=file_settings.exclude
        )
    if slot_options.hostfile is not None:  # it defines the machines and their slots
        overridden = {
            "num_machines": file_settings.nodes not in {None, 1},
            "num_processes": file_settings.per_node is not None,
            "gpu_ids": bool(file_settings.slots),
        }
        return slot_options, [name for name, is_set in overridden.items() if is_set]
    if file_settings.hostfile:
        slot_options = replace(slot_options, hostfile=Path(file_settings.hostfile))
    elif file_settings.slots and not filtered:
        slots = file_settings.slots.split(",")
        count = len(slots) if slot_options.num_gpus is None else slot_options.num_gpus
        if not 1 <= count <= len(slots):
            requirement = f"must be 1 to {len(slots)}, as many as gpu_ids of the file names"
            raise ConfigError("hosts and slots", [f"num_gpus: {requirement}, got {count}"])
        nodes = None if slot_options.num_nodes == 1 else slot_options.num_nodes
        local_slots = ",".join(slots[:count])
        return replace(slot_options, localhost=local_slots, num_gpus=None, num_nodes=nodes), []
    if slot_options.include or slot_options.exclude:
        return slot_options, []
    nodes = _first_set(
        slot_options.num_nodes, file_settings.nodes if slot_options.hostfile else None
    )
    return replace(
        slot_options,
        num_nodes=nodes,
        num_gpus=_first_set(slot_options.num_gpus, file_settings.per_node),
    ), []


def _first_set(number: int | None, otherwise: int | None) -> int | None:
    """Return the number of the command line, else that of the file; 0 is a number."""
    return otherwise if number is None else number


def _one_of_several(  # noqa: PLR0917 - settings of one of several coordinators
    slot_options: SlotOptions,
    count: int | None,
    rank: int | None,
    address: str,
    port: int | None,
    find_slots: FindSlots,
    *,
    cpu: bool,
) -> tuple[list[MachineSlots], Nodes]:
    """Return this machine as one of several that are started separately, with equal slots."""
    problems = []
    if count is None or count < 1:
        problems.append("num_nodes: must be the number of machines")
    if rank is None or not 0 <= rank < (count or rank + 1):
        problems.append(f"node_rank: must be 0 to num_nodes - 1, got {rank}")
    if not address:
        problems.append("master_addr: must be the address of the machine of node rank 0")
    if slot_options.hostfile or slot_options.include or slot_options.exclude:
        problems.append("no_ssh: hostfile, include and exclude are for a start over ssh")
    if problems:
        raise ConfigError("one node of several", problems)
    local_options = SlotOptions(num_gpus=slot_options.num_gpus, localhost=slot_options.localhost)
    local_slots = _local_slots(local_options, find_slots, cpu=cpu)
    (machine,) = choose_machines(local_options, local_slots, read_default=False)
    sizes = (len(machine.slots),) * (count or 1)
    port = DEFAULT_PORT if port is None else port
    return [machine], Nodes(sizes, rank or 0, address, port)
