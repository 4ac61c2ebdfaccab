"""Deep merge of configurations."""

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["merge"]


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into a configuration, key by key at every depth, without checks.

    Args:
        base: The configuration.
        overrides: Changes.

    Example:
        >>> from zerolab.config.merging import merge
        >>> merge({"name": "a", "resources": {"priority": 1}}, {"resources": {"weight": 2}})
        {'name': 'a', 'resources': {'priority': 1, 'weight': 2}}
    """
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
