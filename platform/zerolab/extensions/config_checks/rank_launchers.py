"""Commands that start ranks, such as ``torchrun``, in entrypoints whose ranks Zerolab starts."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerolab.config.experiment.resources import ResourcesConfig
from zerolab.contract.spec import Command

__all__ = ["launcher_of", "launcher_problem", "parse_python_command"]

_NAME = r"[A-Za-z_]\w*"
_PYTHON = re.compile(r"python[0-9.]*")
_OPTION = re.compile(r"-[^-WXmc]*([WXmc]?)(.*)", re.DOTALL)
"""Options without a value, the option with a value, and the value if it is in the same word."""


def parse_python_command(arguments: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """Parse the command line of a Python interpreter.

    Args:
        arguments: Words of a command.

    Returns:
        ``m``, ``c`` or an empty text for a script; the module, the code or the script (``-`` or an
        empty text is standard input); the arguments after it. None for another program.
    """
    if not arguments or not _PYTHON.fullmatch(posixpath.basename(arguments[0])):
        return None
    index = 1
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "-":
        letter, value = _OPTION.findall(arguments[index])[0]
        index += 1
        if letter in {"m", "c"}:
            remaining = arguments[index:]
            return letter, value or "".join(remaining[:1]), remaining if value else remaining[1:]
        if arguments[index - 1] == "--check-hash-based-pycs" or (letter and not value):
            index += 1
    return "", "".join(arguments[index : index + 1]), arguments[index + 1 :]


@dataclass(frozen=True)
class RankLauncher:
    """A program in a command that starts ranks itself."""

    name: str
    """E.g. ``torchrun``, ``accelerate launch``, ``python -m torch.distributed.run``."""
    instead: str
    """The command without it: ``python train.py --lr 1``."""
    nodes: str
    """Number of nodes in its options, e.g. ``2`` or ``1:4``; empty if not set."""
    hides_run: bool
    """Its ranks do not find the run and cannot report to it."""


_LAUNCHERS: dict[str, str] = {
    "torchrun": "",
    "torch.distributed.run": "",
    "torch.distributed.launch": "",
    "deepspeed": "",
    "deepspeed.launcher.runner": "",
    "accelerate": "launch",
    "accelerate-launch": "",
    "accelerate.commands.launch": "",
    "zerolab": "launch",
}
"""Programs and modules that start ranks, with the subcommand if they have several."""
_SHELL = re.compile(r"(?:ba|da|k|z)?sh")
_ASSIGNMENT = re.compile(rf"{_NAME}=.*", re.DOTALL)
_COMMAND_PREFIXES = frozenset({"env", "exec", "nohup", "time"})
"""Shell words and programs that run the command after them."""
_LEFT_TO_THE_SHELL = re.compile(r"RANK|\|\||\b(?:if|case|for|while|until|test)\b|\[|\n")
"""Shell syntax with which a launcher may run once, or know its node."""
_PRINTS_ONLY = frozenset({"-h", "--help", "--version"})
"""Options with which a launcher only prints something."""
_NUMBERED_OUTPUT = re.compile(r"\s\d+(?=[<>])")
"""The 2 of ``2>&1``."""
_NODES = re.compile(r"--?(?:nnodes|num[-_]nodes|num[-_]machines)")
_USES_TORCHRUN = re.compile(r"--(?:multi[-_]gpu|use[-_](?:deepspeed|fsdp|megatron[-_]lm))")
"""Options with which accelerate starts torchrun, even for one process."""
_STARTS_REMOTE_RANKS = frozenset({"deepspeed", "deepspeed.launcher.runner", "zerolab"})
"""Launchers that also start the ranks of other machines, unless ``--no_ssh`` is set."""


def launcher_of(command: Command) -> RankLauncher | None:
    """Return the launcher that a command starts, or None.

    Only certain cases count: shell scripts are not read, nor texts in which ranks may differ.

    Args:
        command: The experiment's command.
    """
    return _launcher(command.words)


def _launcher(arguments: Sequence[str]) -> RankLauncher | None:
    while arguments and (arguments[0] in _COMMAND_PREFIXES or _ASSIGNMENT.fullmatch(arguments[0])):
        arguments = arguments[1:]
    if len(arguments) > 2 and _SHELL.fullmatch(posixpath.basename(arguments[0])):
        option, text = arguments[1], arguments[2]
        texts = _commands_in(text) if option.startswith("-") and option.endswith("c") else ()
        return next(filter(None, map(_launcher, texts)), None)
    ran = parse_python_command(arguments)
    if ran is None:
        program = _program(arguments[0]) if arguments else ""
        name, script_arguments = program, list(arguments[1:])
    elif ran[0] == "m":
        program, script_arguments = ran[1], list(ran[2])
        name = f"python -m {program}"
    else:
        return None
    verb = _LAUNCHERS.get(program)
    if verb is None or (verb and script_arguments[:1] != [verb]):
        return None
    name = f"{name} {verb}".rstrip()
    script = next(
        (i for i, word in enumerate(script_arguments) if word.endswith(".py")),
        len(script_arguments),
    )
    module = next((i for i in range(script) if script_arguments[i] in {"-m", "--module"}), script)
    options = dict(_option_pairs(script_arguments[:module]))
    if _PRINTS_ONLY.intersection(options) or ("accelerate" in name and _runs_in_process(options)):
        return None
    nodes = next((value for option, value in options.items() if _NODES.fullmatch(option)), "")
    if program in _STARTS_REMOTE_RANKS and not {"--no_ssh", "--no-ssh"} & options.keys():
        nodes = ""
    arguments = (
        ["-m", *script_arguments[module + 1 :]] if module < script else script_arguments[script:]
    )
    instead = shlex.join(["python", *(arguments or ["script.py"])])
    return RankLauncher(name, instead, nodes, hides_run=program == "zerolab")


def _program(word: str) -> str:
    """Return a program's name; empty for a file of the model directory."""
    return posixpath.basename(word) if "/" not in word or word.startswith("/") else ""


def _runs_in_process(options: Mapping[str, str]) -> bool:
    """Return whether accelerate runs the script in its own process."""
    if "--cpu" in options:
        return True
    is_single = options.get("--num_processes", options.get("--num-processes")) == "1"
    return is_single and not any(map(_USES_TORCHRUN.fullmatch, options))


def _commands_in(text: str) -> Iterator[list[str]]:
    """Split a shell's text into the commands that it runs in sequence.

    A command ends where its output is redirected.
    """
    if _LEFT_TO_THE_SHELL.search(text):
        return
    lexer = shlex.shlex(_NUMBERED_OUTPUT.sub(" ", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    is_redirected = False
    try:
        for word in lexer:
            if word in {"&&", ";"}:
                yield command
                command, is_redirected = [], False
            elif set(word) <= set(lexer.punctuation_chars):
                is_redirected = bool(command)
            elif not is_redirected:
                command.append(word)
    except ValueError:
        return
    yield command


def _option_pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options with their values, in the same word or in the next."""
    for word, after in zip(arguments, [*arguments[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        yield option, value if equals else after


def launcher_problem(launcher: RankLauncher, resources: ResourcesConfig) -> str | None:
    """Return the problem of a launcher that would be started more than once, or None.

    Args:
        launcher: The launcher that the entrypoint's command starts.
        resources: The block, with the slots of a hostfile.
    """
    slots, unit = resources.slots_per_trial, resources.slots_per_rank
    processes, name, nodes = slots // unit, launcher.name, launcher.nodes or "1"
    if processes < 2 or not nodes.isdecimal() or nodes == str(processes):
        return None
    remedy = f"write {launcher.instead!r} (the platform starts a rank on each slot)"
    several = int(nodes) if len(nodes) <= 6 else 0  # more digits are not a number of machines
    if resources.hostfile is None and not launcher.hides_run and several and slots % several == 0:
        which = f"each of {several} processes" if several > 1 else "one process"
        remedy += (
            f", or set resources.slots_per_rank: {slots // several} ({which} has that many slots "
            f"of a machine, and {name} starts its ranks there)"
        )
    on = f"each of {slots} slots" if unit == 1 else f"every {unit} of {slots} slots"
    return (
        f"must not start ranks, because Zerolab starts it on {on}, got "
        f"{name!r}, whose ranks would be started {processes} times; {remedy}"
    )
