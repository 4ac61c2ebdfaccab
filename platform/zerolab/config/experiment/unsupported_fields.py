"""Experiment keys and searchers that are not supported, with their replacement."""

from zerolab.config.unsupported import EMPTY, OffValues, UnsupportedKey
from zerolab.replacements import replacements
from zerolab.searcher.registry import SEARCHERS

__all__ = ["OTHER_SEARCHERS", "OTHER_SEARCHER_KEYS", "REMOVED_BACKEND", "UNSUPPORTED_FIELDS"]

REMOVED_BACKEND = (
    "remove it to train with Zerolab's engine; for DeepSpeed's own engine call "
    "deepspeed.initialize() in the trial and give the engine to context.wrap_model_engine()"
)
"""Replacement of ``backend: deepspeed``."""

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

OTHER_SEARCHER_KEYS = frozenset(
    {
        *("max_time", "time_metric", "divisor", "max_rungs", "num_rungs", "mode"),
        *("bracket_rungs", "unit"),
    }
)
"""Keys that only those searchers have."""
