"""Experiment keys and searchers that are not supported, with their replacement."""

from collections.abc import Collection, Mapping
from typing import Any

from zerolab.config.experiment.experiment_config import REMOVED_BACKEND
from zerolab.extensions.config_checks.unsupported import (
    EMPTY,
    OffValues,
    UnsupportedKey,
    remove_unsupported,
)
from zerolab.replacements import replacements
from zerolab.searcher.registry import SEARCHERS

__all__ = ["OTHER_SEARCHERS", "UNSUPPORTED_FIELDS", "without_unsupported"]

_OTHER_KEYS = dict.fromkeys(
    ("resources.slots_per_task", "resources.slots_per_worker", "resources.gpus"),
    "set resources.slots_per_trial",
) | {"resources.slots_per_node": "set resources.slots_per_trial to the slots of all nodes"}
"""Keys of other platforms."""

UNSUPPORTED_FIELDS = {
    key: UnsupportedKey(text, EMPTY)
    for key, text in (replacements("experiment.") | _OTHER_KEYS).items()
} | {
    "backend": UnsupportedKey(
        REMOVED_BACKEND,
        OffValues(
            f"`zerolab`, {EMPTY.text}", lambda value: value == "zerolab" or EMPTY.matches(value)
        ),
    ),
}
"""Unsupported fields, by dotted key."""

OTHER_SEARCHERS = {
    name: f"must be one of {', '.join(SEARCHERS)}; {name} is {replacement} here"
    for name, replacement in replacements("searcher.name: ").items()
}
"""Determined's other names of searchers, with the message."""

_OTHER_SEARCHER_KEYS = frozenset(
    {
        *("max_time", "time_metric", "divisor", "max_rungs", "num_rungs", "mode"),
        *("bracket_rungs", "unit"),
    }
)
"""Keys that only those searchers have."""


def without_unsupported(
    content: Mapping[str, Any], opaque: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return an experiment file without unsupported keys and searchers, and their problems.

    Args:
        content: The file.
        opaque: Dotted keys whose content belongs to the user.
    """
    content, problems = _without_other_searcher(content)
    supported, refused, _ = remove_unsupported(content, UNSUPPORTED_FIELDS, opaque)
    return supported, problems + refused


def _without_other_searcher(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Reject a searcher that Determined names differently, in one line.

    Returns:
        The file with a known searcher instead, so that its other errors are found, and the
        problems.
    """
    searcher = content.get("searcher")
    name = searcher.get("name") if isinstance(searcher, Mapping) else None
    if (
        not isinstance(searcher, Mapping)
        or not isinstance(name, str)
        or name not in OTHER_SEARCHERS
    ):
        return dict(content), []
    common_keys = {key: value for key, value in searcher.items() if key not in _OTHER_SEARCHER_KEYS}
    accepted = {"max_trials": 1, "max_length": 1} | common_keys | {"name": "random"}
    problem = f"searcher.name: {OTHER_SEARCHERS[name]}, got {name!r}"
    return {**content, "searcher": accepted}, [problem]
