"""Overrides of a configuration on the command line: files, and single values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from zerolab.config.experiment.layers import Layer

__all__ = ["ChangesFiles", "Paused", "Values", "read_changes", "read_overrides"]

ChangesFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file whose keys override the configuration. May be repeated; later files "
        "override earlier ones.",
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


def read_overrides(files: list[Path] | None, values: list[str] | None) -> "list[Layer]":
    """Read the overrides of a configuration; values come after files.

    Args:
        files: YAML files, with their bases.
        values: ``KEY=VALUE`` assignments.

    Raises:
        ConfigError: If a file or a value cannot be read; all problems of the values at once.
    """
    from zerolab.config.experiment.layers import Layer, read_layers
    from zerolab.errors import ConfigError

    layers = [layer for file in files or () for layer in read_layers(file)]
    assignments: dict[str, Any] = {}
    problems = []
    for assignment in values or ():
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(
                f"--set: must be KEY=VALUE, such as searcher.max_trials=16, got {assignment!r}"
            )
            continue
        problem = _put(assignments, key.split("."), text)
        if problem:
            problems.append(f"--set {key}: {problem}, got {text!r}")
    if problems:
        raise ConfigError("changes", problems)
    return [*layers, Layer("--set", assignments)] if assignments else layers


def read_changes(
    files: list[Path] | None, values: list[str] | None, *, paused: bool
) -> dict[str, Any]:
    """Return the body of a request that changes a configuration.

    Raises:
        ConfigError: If a file or a value cannot be read.
    """
    from zerolab.config.experiment.layers import merge_layers

    config = merge_layers(read_overrides(files, values))
    return {"config": config, "activate": not paused}


def _put(config: dict[str, Any], path: list[str], text: str) -> str | None:
    """Set a value at its path; return the problem, or None."""
    from zerolab.config.files import parse_yaml_value

    try:
        value = parse_yaml_value(text)
    except ValueError as error:
        return f"must be a value in YAML ({error})"
    for key in path[:-1]:
        block = config.setdefault(key, {})
        if not isinstance(block, dict):
            return f"{key} is a value, not a block; it cannot have keys"
        config = block
    config[path[-1]] = value
    return None
