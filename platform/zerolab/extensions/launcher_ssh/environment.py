"""Environment variables of ranks on other machines, by DeepSpeed's rules."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT
from zerolab.errors import ConfigError

__all__ = ["ENV_FILE", "exported_variables", "parse_environment", "sent_variables"]

ENV_FILE = "DS_ENV_FILE"
"""Variable with the path of a file that replaces ``.deepspeed_env``."""

_FILE = ".deepspeed_env"
_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "OMP_")
_QUOTES = frozenset("\"'")
_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")
"""A value inside one pair of quotes, not two as in ``"one" and "two"``."""
_EXPORT = re.compile(r"^export\s+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this machine that are sent to others."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) or name == ENV_COLLECTIVE_TIMEOUT
    }


def sent_variables(directory: Path) -> dict[str, str]:
    """Read ``.deepspeed_env`` of the home directory, then that of ``directory``.

    Raises:
        ConfigError: If a line is not ``NAME=VALUE``, or the named file cannot be read.
    """
    env_file = os.environ.get(ENV_FILE)
    if env_file and Path(env_file).is_absolute():
        files = [Path(env_file)]
        if not files[0].is_file():
            raise ConfigError("environment", [f"{ENV_FILE}: must name a file, got {env_file}"])
    else:
        files = [folder / (env_file or _FILE) for folder in (Path.home(), directory)]
    variables: dict[str, str] = {}
    for file in dict.fromkeys(files):
        if file.is_file():
            variables |= parse_environment(_text_of(file), str(file))
    return variables


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(str(file), [f"must be readable, got {reason}"]) from None


def parse_environment(text: str, source: str) -> dict[str, str]:
    """Read lines of ``NAME=VALUE``; empty lines and comments are ignored.

    ``export`` before a name and quotes around a complete value are removed. Everything after a
    value belongs to it, even ``#``, as in DeepSpeed.

    Raises:
        ConfigError: With every invalid line.
    """
    variables, problems = {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = _EXPORT.sub("", content).partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            problems.append(f"line {number}: must look like `NAME=VALUE`, got {content!r}")
        elif value[:1] in _QUOTES and value.count(value[0]) == 1:
            problem = f"the quote {value[0]} must be closed on the same line"
            problems.append(f"line {number}: {problem}, got {content!r}")
        if _QUOTED.fullmatch(value):
            value = value[1:-1]
        variables[name] = value
    if problems:
        raise ConfigError(source, problems)
    return variables
