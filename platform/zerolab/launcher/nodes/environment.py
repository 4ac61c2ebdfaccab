"""What ranks on other machines find in their environment: DeepSpeed's rules."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT
from zerolab.errors import ConfigError

__all__ = ["ENV_FILE", "exported", "parse_environment", "sent_variables"]

ENV_FILE = "DS_ENV_FILE"
"""Names another file in place of ``.deepspeed_env``."""

_FILE = ".deepspeed_env"
_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "OMP_")
_QUOTES = frozenset("\"'")
_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")
"""A value that one pair of quotes encloses, and not two of them as in ``"one" and "two"``."""
_EXPORT = re.compile(r"^export\s+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that other machines get from this one."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) or name == ENV_COLLECTIVE_TIMEOUT
    }


def sent_variables(directory: Path) -> dict[str, str]:
    """Read ``.deepspeed_env`` of the home directory, then that of ``directory``, which wins.

    Raises:
        ConfigError: If a line is none of ``NAME=VALUE``, or the named file cannot be read.
    """
    named = os.environ.get(ENV_FILE)
    if named and Path(named).is_absolute():
        files = [Path(named)]
        if not files[0].is_file():
            raise ConfigError("environment", [f"{ENV_FILE}: must name a file, got {named}"])
    else:
        files = [folder / (named or _FILE) for folder in (Path.home(), directory)]
    found: dict[str, str] = {}
    for file in dict.fromkeys(files):
        if file.is_file():
            found |= parse_environment(_text_of(file), str(file))
    return found


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(str(file), [f"must be readable, got {why}"]) from None


def parse_environment(text: str, source: str) -> dict[str, str]:
    """Read lines of ``NAME=VALUE``; empty ones, and those that begin with ``#``, do not count.

    ``export`` before a name and quotes around a whole value are taken off; what follows a value,
    ``#`` too, belongs to it, as under DeepSpeed.

    Raises:
        ConfigError: With every line that is none.
    """
    found, problems = {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = _EXPORT.sub("", content).partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            problems.append(f"line {number}: must look like `NAME=VALUE`, got {content!r}")
        elif value[:1] in _QUOTES and value.count(value[0]) == 1:
            told = f"the quote {value[0]} must be closed on the same line"
            problems.append(f"line {number}: {told}, got {content!r}")
        if _QUOTED.fullmatch(value):
            value = value[1:-1]
        found[name] = value
    if problems:
        raise ConfigError(source, problems)
    return found
