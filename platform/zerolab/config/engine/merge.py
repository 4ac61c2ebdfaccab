"""Merging overrides into an engine configuration."""

import copy
from collections.abc import Mapping
from os import PathLike
from typing import Any

from zerolab.config.engine.normalization import log_changes, normalize, read_source
from zerolab.errors import ConfigError

__all__ = ["merge", "overwrite_deepspeed_config"]


def overwrite_deepspeed_config(
    base: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge overrides into an engine configuration, key by key at every depth.

    A mapping merges into a mapping; anything else (a scalar, a list, null, ``"auto"``) is
    replaced, whichever side is the mapping. Neither argument is changed or shared.

    Args:
        base: Path of a JSON file, or its content as a mapping.
        overrides: Changes, e.g. ``{"optimizer": {"params": {"lr": 0.005}}}``.

    Returns:
        A new mapping.

    Raises:
        ConfigError: If ``base`` is a path that cannot be read as JSON, or an argument is neither.
    """
    problems: list[str] = []
    if not isinstance(base, str | PathLike | Mapping):
        type_name = type(base).__name__
        problems.append(f"base: must be the path of a JSON file or a mapping, got a {type_name}")
    if not isinstance(overrides, Mapping):
        problems.append(f"overrides: must be a mapping, got a {type(overrides).__name__}")
    if problems:
        raise ConfigError("overwrite_deepspeed_config", problems)
    content, changes = read_source(base)
    parts = []
    name = "engine config" if isinstance(base, Mapping) else str(base)
    for source, part in ((name, content), ("overrides", overrides)):
        clean, more = normalize(part, source)
        log_changes(source, [*changes, *more])
        parts.append(clean)
        changes = []
    return merge(*parts)


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into a configuration, key by key at every depth, without checks.

    Args:
        base: The configuration.
        overrides: Changes.
    """
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
