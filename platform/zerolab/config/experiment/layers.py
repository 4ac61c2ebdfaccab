"""Experiment files with bases (``extends``), and overrides that are merged over them."""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from zerolab.config.files import experiment_file, read_yaml
from zerolab.config.merging import merge
from zerolab.errors import ConfigError

__all__ = ["EXTENDS", "Layer", "merge_layers", "origin_of", "read_experiment", "read_layers"]

EXTENDS = "extends"
"""Key of a file that names its bases."""


class Layer(NamedTuple):
    """Part of a configuration, and where it comes from."""

    origin: str
    """Path of the file, or name of the option."""
    content: Mapping[str, Any]


def read_experiment(path: str | PathLike[str]) -> dict[str, Any]:
    """Read an experiment file and merge it over its bases.

    Args:
        path: The experiment file.

    Returns:
        The content without ``extends``; it is not checked.

    Raises:
        ConfigError: If a file cannot be read, or the files extend each other in a cycle.

    Example:
        >>> from pathlib import Path
        >>> from zerolab.config.experiment.layers import read_experiment
        >>> size = Path("base.yaml").write_text("{max_restarts: 1, name: base}")
        >>> size = Path("small.yaml").write_text("{extends: base.yaml, name: small}")
        >>> read_experiment("small.yaml")
        {'max_restarts': 1, 'name': 'small'}
    """
    return merge_layers(read_layers(path))


def merge_layers(layers: Iterable[Layer]) -> dict[str, Any]:
    """Merge layers, block by block; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer.content)
    return merged


def origin_of(key: str, layers: Iterable[Layer]) -> str | None:
    """Return the origin of the last layer that sets a dotted key; None if none does."""
    return next((layer.origin for layer in reversed([*layers]) if _sets(layer.content, key)), None)


def _sets(content: Mapping[str, Any], key: str) -> bool:
    """Return whether a layer sets a key or its block, with nothing or a list or a value."""
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return value is not None
        if part not in value:
            return False
        value = value[part]
    return value is not None


def read_layers(path: str | PathLike[str]) -> list[Layer]:
    """Read a file and its bases; bases come first.

    Raises:
        ConfigError: If a file cannot be read, or the files extend each other in a cycle.
    """
    return _read(Path(path), ())


def _read(path: Path, extending: tuple[Path, ...]) -> list[Layer]:
    content = dict(read_yaml(path))
    names = content.pop(EXTENDS, None) or []
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"{EXTENDS}: must be the path of a file or a list of them, got {names!r}"
        raise ConfigError(str(path), [problem])
    chain = (*extending, path.resolve())
    layers = []
    for name in names:
        base = experiment_file(path.parent / name)
        if base.resolve() in chain:
            first = chain.index(base.resolve())
            cycle = " -> ".join(file.name for file in [*chain[first:], base])
            problem = f"{EXTENDS}: must not lead back to the file itself, got {cycle}"
            raise ConfigError(str(path), [f"{problem}; remove one of them"])
        try:
            layers += _read(base, chain)
        except ConfigError as error:
            if base.exists():
                raise
            problems = [f"{EXTENDS}: {problem}" for problem in error.problems]
            raise ConfigError(str(path), problems) from None
    return [*layers, Layer(str(path), content)]
