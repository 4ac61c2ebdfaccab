"""Merging overrides into an engine configuration."""

import copy
from collections.abc import Mapping
from os import PathLike
from typing import Any

from zerolab.config.files import read_json

__all__ = ["overwrite_deepspeed_config"]


def overwrite_deepspeed_config(
    base: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay overrides over an engine configuration, key by key at every depth.

    A mapping merges into a mapping; anything else (a scalar, a list, null, ``"auto"``) is
    replaced, whichever side is the mapping. Neither argument is changed or shared.

    Args:
        base: Path of a JSON file, or its content as a mapping.
        overrides: What to change, e.g. ``{"optimizer": {"params": {"lr": 0.005}}}``.

    Returns:
        A new mapping.

    Raises:
        ConfigError: If ``base`` is a path that cannot be read as JSON.
    """
    content = base if isinstance(base, Mapping) else read_json(base)
    return _merge(content, overrides)


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
