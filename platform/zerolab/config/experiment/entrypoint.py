"""What an entrypoint means: a trial class, or a command; the only place that reads one."""

import re
import shlex

from zerolab.contract.spec import Command, TrialClass

__all__ = ["parse_entrypoint"]

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
        raise ValueError(f"{text}, got {value!r}")
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
    raise ValueError(f"{text}; write {meant or 'module:Class'}, got {value!r}")
