"""Parser of entrypoints: a trial class, or a command."""

import re
import shlex

from zerolab.contract.secret_text import mask_assignments
from zerolab.contract.spec import Command, TrialClass

__all__ = ["determined_launcher_problem", "parse_entrypoint"]

_NAME = r"[A-Za-z_]\w*"
_CLASS = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})")


def parse_entrypoint(value: object) -> TrialClass | Command:
    """Read the entrypoint of an experiment file.

    Args:
        value: ``module:Class``, or a command: text that is split like a shell does, or a list of
            words.

    Raises:
        ValueError: If it is neither, or looks like a class in another notation.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    arguments = [word for word in items if isinstance(word, str) and word.strip()]
    if not arguments or len(arguments) < len(items):
        text = "must be module:Class, or a command as text or as a list of words"
        raise ValueError(f"{text}, got {mask_assignments(repr(value))}")
    if isinstance(value, str):
        try:
            arguments = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"must be a command that can be split, got {error}") from None
        if len(arguments) == 1:
            return _single_word(arguments[0], value)
    return Command(tuple(arguments))


def _single_word(word: str, value: object) -> TrialClass | Command:
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


def determined_launcher_problem(value: object) -> str | None:
    """Return the problem of an entrypoint with Determined's launcher; None without one."""
    items = value if isinstance(value, list | tuple) else [value]
    flat = " ".join(map(str, items)).split()
    index = next((i for i, word in enumerate(flat) if word.startswith("determined.launch")), None)
    if index is None:
        return None
    classes = (word for word in flat if _CLASS.fullmatch(word))
    script = next((i for i in range(index + 1, len(flat)) if flat[i].endswith(".py")), None)
    replacement = next(classes, None)
    if replacement is None and script is not None:
        before = flat[script - 1]
        runner = before if before.startswith("python") else "python3"
        replacement = " ".join([runner, *flat[script:]])
    text = "ranks are started without Determined's launchers"
    shown = mask_assignments(f"write {replacement or 'module:Class'}, got {value!r}")
    return f"{text}; {shown}"
