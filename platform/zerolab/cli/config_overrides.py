"""Overrides of a configuration on the command line: a file, and single values."""

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["ChangesFile", "Paused", "Values", "read_changes"]

ChangesFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML file whose keys override the configuration."
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, such as searcher.max_trials=16. May be repeated.",
    ),
]
Paused = Annotated[bool, typer.Option("--paused", help="Create it paused; `activate` starts it.")]


def read_changes(file: Path | None, values: list[str] | None, *, paused: bool) -> dict[str, Any]:
    """Return the body of a request that changes a configuration.

    Raises:
        ConfigError: If the file or a value cannot be read; all problems at once.
    """
    from zerolab.config.files import read_yaml
    from zerolab.errors import ConfigError

    config: dict[str, Any] = dict(read_yaml(file)) if file is not None else {}
    problems = []
    for assignment in values or ():
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(
                f"--set: must be KEY=VALUE, such as searcher.max_trials=16, got {assignment!r}"
            )
            continue
        problem = _put(config, key.split("."), text)
        if problem:
            problems.append(f"--set {key}: {problem}, got {text!r}")
    if problems:
        raise ConfigError("changes", problems)
    return {"config": config, "activate": not paused}


def _put(config: dict[str, Any], path: list[str], text: str) -> str | None:
    """Set a value at its path; return the problem, or None."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return f"must be a value in YAML ({str(error).splitlines()[0]})"
    for key in path[:-1]:
        block = config.setdefault(key, {})
        if not isinstance(block, dict):
            return f"{key} is a value, not a block; it cannot have keys"
        config = block
    config[path[-1]] = value
    return None
