"""What an entrypoint means: a trial class, or a command; the only place that reads one."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerolab.contract.secret_text import mask_assignments
from zerolab.contract.spec import Command, TrialClass

__all__ = ["Launcher", "launcher_of", "parse_entrypoint", "what_python_runs"]

_NAME = r"[A-Za-z_]\w*"
_CLASS = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})")


def parse_entrypoint(value: object) -> TrialClass | Command:
    """Read the entrypoint of an experiment file.

    Args:
        value: ``module:Class``, or a command: text, which is split as a shell would, or a list of
            words.

    Raises:
        ValueError: If it is neither, or looks like a class that is written another way.
    """
    given = list(value) if isinstance(value, list | tuple) else [value]
    words = [word for word in given if isinstance(word, str) and word.strip()]
    if not words or len(words) < len(given):
        text = "must be module:Class, or a command as text or as a list of words"
        raise ValueError(f"{text}, got {mask_assignments(repr(value))}")
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"must be a command that can be split, got {error}") from None
        if len(words) == 1:
            return _one_word(words[0], value)
    _refuse_determined(words, value)
    return Command(tuple(words))


def _one_word(word: str, value: object) -> TrialClass | Command:
    named = _CLASS.fullmatch(word)
    if named and not named[1].endswith(".py"):
        return TrialClass(named[1], named[2])
    if ":" in word:
        path, _, name = word.rpartition(":")
        module = path.removesuffix(".py").strip("./").replace("/", ".")
        meant_word = f"{module}:{name}"
        hint = f"; did you mean {meant_word!r}?" if _CLASS.fullmatch(meant_word) else ""
        raise ValueError(f"must be module:Class, as in an import, got {value!r}{hint}")
    return Command((word,))


def _refuse_determined(words: list[str], value: object) -> None:
    """Refuse Determined's launchers, and say what to write in their place."""
    flat = " ".join(words).split()
    place = next((i for i, word in enumerate(flat) if word.startswith("determined.launch")), None)
    if place is None:
        return
    classes = (word for word in flat if _CLASS.fullmatch(word))
    script = next((i for i in range(place + 1, len(flat)) if flat[i].endswith(".py")), None)
    meant = next(classes, None)
    if meant is None and script is not None:
        before = flat[script - 1]
        runner = before if before.startswith("python") else "python3"
        meant = " ".join([runner, *flat[script:]])
    text = "ranks are started without Determined's launchers"
    shown = mask_assignments(f"write {meant or 'module:Class'}, got {value!r}")
    raise ValueError(f"{text}; {shown}")


_PYTHON = re.compile(r"python[0-9.]*")
_OPTION = re.compile(r"-[^-WXmc]*([WXmc]?)(.*)", re.DOTALL)
"""Letters without a value, the one that takes one, and its value if that is in the same word."""


def what_python_runs(words: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """Read the command line of a Python, if it is one.

    Args:
        words: Of a command.

    Returns:
        ``m``, ``c`` or nothing for a script; the module, the code or the script (``-`` or nothing
        is standard input); and the words behind it. None for another program.
    """
    if not words or not _PYTHON.fullmatch(posixpath.basename(words[0])):
        return None
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "-":
        letter, value = _OPTION.findall(words[place])[0]
        place += 1
        if letter in {"m", "c"}:
            behind = words[place:]
            return letter, value or "".join(behind[:1]), behind if value else behind[1:]
        if words[place - 1] == "--check-hash-based-pycs" or (letter and not value):
            place += 1
    return "", "".join(words[place : place + 1]), words[place + 1 :]


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks of its own, as a command names it."""

    name: str
    """E.g. ``torchrun``, ``accelerate launch``, ``python -m torch.distributed.run``."""
    instead: str
    """The script without it: ``python train.py --lr 1``."""
    nodes: str
    """Of how many launchers it is told to be one, e.g. ``2`` or ``1:4``; nothing if it is not."""
    hides_run: bool
    """Its ranks do not find the run, and could not report to it."""


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
"""Programs and modules that start ranks, and the word behind those that do other things too."""
_SHELL = re.compile(r"(?:ba|da|k|z)?sh")
_ASSIGNMENT = re.compile(rf"{_NAME}=.*", re.DOTALL)
_IN_FRONT = frozenset({"env", "exec", "nohup", "time"})
"""Words of a shell and programs that run the command behind them."""
_LEFT_TO_THE_SHELL = re.compile(r"RANK|\|\||\b(?:if|case|for|while|until|test)\b|\[|\n")
"""In a shell's text: what may have a launcher run once, or know its place among others."""
_TELLS = frozenset({"-h", "--help", "--version"})
"""With these a launcher says something and ends."""
_NUMBERED_OUTPUT = re.compile(r"\s\d+(?=[<>])")
"""The 2 of ``2>&1``."""
_NODES = re.compile(r"--?(?:nnodes|num[-_]nodes|num[-_]machines)")
_BY_TORCHRUN = re.compile(r"--(?:multi[-_]gpu|use[-_](?:deepspeed|fsdp|megatron[-_]lm))")
"""With these accelerate starts torchrun, be it for one process."""
_STARTS_OTHERS = frozenset({"deepspeed", "deepspeed.launcher.runner", "zerolab"})
"""They start the ranks of other machines too, unless ``--no_ssh`` is said."""


def launcher_of(command: Command) -> Launcher | None:
    """Say which program a command leaves it to, to start ranks; None for any other command.

    Only what is certain: a shell's script is not read, nor a text in which ranks may differ.

    Args:
        command: Of an experiment.
    """
    return _launcher(command.words)


def _launcher(words: Sequence[str]) -> Launcher | None:
    while words and (words[0] in _IN_FRONT or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    if len(words) > 2 and _SHELL.fullmatch(posixpath.basename(words[0])):
        option, text = words[1], words[2]
        texts = _commands_in(text) if option.startswith("-") and option.endswith("c") else ()
        return next(filter(None, map(_launcher, texts)), None)
    ran = what_python_runs(words)
    if ran is None:
        program = _program(words[0]) if words else ""
        name, behind = program, list(words[1:])
    elif ran[0] == "m":
        program, behind = ran[1], list(ran[2])
        name = f"python -m {program}"
    else:
        return None
    verb = _LAUNCHERS.get(program)
    if verb is None or (verb and behind[:1] != [verb]):
        return None
    name = f"{name} {verb}".rstrip()
    script = next((i for i, word in enumerate(behind) if word.endswith(".py")), len(behind))
    module = next((i for i in range(script) if behind[i] in {"-m", "--module"}), script)
    said = dict(_pairs(behind[:module]))
    if _TELLS.intersection(said) or ("accelerate" in name and _starts_none(said)):
        return None
    nodes = next((value for option, value in said.items() if _NODES.fullmatch(option)), "")
    if program in _STARTS_OTHERS and not {"--no_ssh", "--no-ssh"} & said.keys():
        nodes = ""
    words = ["-m", *behind[module + 1 :]] if module < script else behind[script:]
    instead = shlex.join(["python", *(words or ["script.py"])])
    return Launcher(name, instead, nodes, hides_run=program == "zerolab")


def _program(word: str) -> str:
    """Its name; nothing for a file of the model directory, which may be anything."""
    return posixpath.basename(word) if "/" not in word or word.startswith("/") else ""


def _starts_none(said: Mapping[str, str]) -> bool:
    """Whether accelerate becomes the script: the rank that the platform has started."""
    if "--cpu" in said:
        return True
    alone = said.get("--num_processes", said.get("--num-processes")) == "1"
    return alone and not any(map(_BY_TORCHRUN.fullmatch, said))


def _commands_in(text: str) -> Iterator[list[str]]:
    """Split a shell's text into the commands that it runs one after the other.

    Each ends where its output is sent elsewhere.
    """
    if _LEFT_TO_THE_SHELL.search(text):
        return
    lexer = shlex.shlex(_NUMBERED_OUTPUT.sub(" ", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    ended = False
    try:
        for word in lexer:
            if word in {"&&", ";"}:
                yield words
                words, ended = [], False
            elif set(word) <= set(lexer.punctuation_chars):
                ended = bool(words)
            elif not ended:
                words.append(word)
    except ValueError:
        return
    yield words


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, in the same word or in the next."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        yield option, value if equals else after
