"""Dialects of engine files: conversion to the form that the strict reader expects.

The core reads plain JSON with every value in it. An extension adds what other programs read, such
as comments, old names of keys, and ``"auto"``.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.config.files import parse_json, read_bytes, read_yaml
from zerolab.errors import ConfigError
from zerolab.registry import PARTS
from zerolab.schema.json_values import json_value_problems, to_json_values

if TYPE_CHECKING:
    from zerolab.config.experiment.model_files import ModelFiles

__all__ = ["Dialect", "ResolvedAuto", "dialect", "log_changes", "read_engine_text", "read_source"]

logger = logging.getLogger("zerolab.config")


@dataclass(frozen=True)
class ResolvedAuto:
    """An engine file without ``"auto"`` values."""

    content: dict[str, Any]
    origins: dict[str, str]
    """Origin of the value of each ``"auto"`` key."""
    problems: list[str]
    """One line for each key without a value. Such keys are left out."""
    bad: frozenset[str]
    """These keys, and the keys that depend on them."""


class Dialect:
    """Plain JSON; an extension has a module with the same attributes."""

    unsupported: Mapping[str, Any] = {}
    """Keys of other programs, with their replacements."""

    def read_text(self, text: bytes | str, source: str) -> dict[str, Any] | None:
        """Read text that is not JSON; None if it is nothing else either."""
        del text, source
        return None

    def normalize(
        self, content: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[str]]:
        """Convert a file's content to the form that the strict reader expects.

        Args:
            content: A file; it is not changed.
            source: Its name, for messages.

        Returns:
            The content, and one line for each change.

        Raises:
            ConfigError: If it has values that no file may have.
        """
        check_json_values(content, source)
        return dict(content), []

    def without_aliases(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Replace aliases of keys by canonical keys; both names at once are a problem."""
        return dict(content), []

    def fill_auto(
        self,
        content: Mapping[str, Any],
        hyperparameters: Mapping[str, Any] | None,
        batches: int | None,
        idle: Collection[str],
    ) -> ResolvedAuto:
        """Replace each ``"auto"`` by its value.

        Args:
            content: An engine file with canonical keys.
            hyperparameters: A trial's, nested or not; None means those of the trial that this
                process belongs to
                (:func:`zerolab.config.engine.trial_values.trial_values`), if it does.
            batches: Maximum length of the trial in optimizer steps.
            idle: Dotted keys that have no effect here.
        """
        del hyperparameters, batches, idle
        missing = PARTS.problem("deepspeed_config")
        problems = [
            f"{key}: must be a value, got 'auto'; {missing}"
            for key in _auto_keys(content)
            if missing
        ]
        return ResolvedAuto(dict(content), {}, problems, frozenset())

    def remove_unsupported(
        self, content: Mapping[str, Any], opaque: Collection[str]
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Remove unsupported keys.

        Args:
            content: The file.
            opaque: Dotted keys whose content belongs to the user.

        Returns:
            The file without them, a problem for each key that is on, and the keys that are off.
        """
        del opaque
        return dict(content), [], []

    def drop_idle(self, content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """Drop blocks that have no effect; returns one line for each."""
        return content, []

    def argument_problems(self, space: Mapping[str, Any], model: "ModelFiles") -> list[str]:
        """Check hyperparameters that a script passes to another library.

        Args:
            space: An experiment's hyperparameters.
            model: The model directory.
        """
        del space, model
        return []


@cache
def dialect() -> Dialect:
    """Return the dialect of this installation: a module of an extension, or plain JSON."""
    extension: Dialect | None = PARTS.find("deepspeed_config")
    return extension or Dialect()


def check_json_values(content: Mapping[str, Any], source: str) -> None:
    """Check that a file has only values of JSON.

    Raises:
        ConfigError: With every other value.
    """
    unfit = json_value_problems(content)
    if unfit:
        raise ConfigError(source, unfit)


def _auto_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{prefix}{name}.")
        elif value == "auto":
            yield f"{prefix}{name}"


def read_engine_text(
    text: bytes | str, source: str, *, strict: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Read a file's text: JSON, else that of the dialect.

    Args:
        text: The content of a file.
        source: Its name, for messages.
        strict: Accept plain JSON only.

    Returns:
        The content, and a line if it is not plain JSON.

    Raises:
        ConfigError: If it is invalid, or names a key twice.
    """
    try:
        return parse_json(text, source, finite=strict), []
    except ConfigError as error:
        read = None if strict else dialect().read_text(text, source)
        if read is None:
            raise
        line = f"{error.problems[0].split('; ')[0]}; read as hjson, as DeepSpeed does"
        return read, [line.replace("must be JSON", "is no plain JSON")]


def read_source(
    source: str | PathLike[str] | Mapping[str, Any], *, strict: bool = False
) -> tuple[Mapping[str, Any], list[str]]:
    """Return a mapping's plain values, or a file's (YAML for ``.yaml`` and ``.yml``, else JSON).

    Raises:
        ConfigError: If a file cannot be read.
    """
    if isinstance(source, Mapping):
        return to_json_values(source), []
    if Path(source).suffix.lower() in (".yaml", ".yml"):
        return read_yaml(source), []
    return read_engine_text(read_bytes(source), str(source), strict=strict)


def log_changes(source: str, changes: list[str]) -> None:
    """Log each change, once for all ranks of a launcher.

    Args:
        source: The file's name.
        changes: From :func:`read_source` and :func:`normalize`.
    """
    if os.environ.get("RANK", "0") == "0":
        for line in changes:
            logger.warning("%s: %s", source, line)  # a plain script shows warnings only
