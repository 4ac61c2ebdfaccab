"""Engine files as DeepSpeed and Hugging Face's libraries read them.

The module has the attributes of :class:`zerolab.config.engine.dialect.Dialect`.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from zerolab.extensions.config_checks.unsupported import remove_unsupported as remove_keys
from zerolab.extensions.deepspeed_config.auto_values import fill_auto
from zerolab.extensions.deepspeed_config.normalization import drop_idle, normalize
from zerolab.extensions.deepspeed_config.unsupported_keys import UNSUPPORTED_KEYS, without_aliases

if TYPE_CHECKING:
    from zerolab.config.experiment.model_files import ModelFiles

__all__ = [
    "argument_problems",
    "drop_idle",
    "fill_auto",
    "normalize",
    "read_text",
    "remove_unsupported",
    "unsupported",
    "without_aliases",
]

unsupported = UNSUPPORTED_KEYS


def read_text(text: bytes | str, source: str) -> dict[str, Any] | None:
    """Read hjson, as DeepSpeed does."""
    from zerolab.extensions.deepspeed_config.hjson_text import parse_hjson

    return parse_hjson(text, source)


def remove_unsupported(
    content: Mapping[str, Any], opaque: Collection[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Remove keys of DeepSpeed without counterpart."""
    return remove_keys(content, UNSUPPORTED_KEYS, opaque)


def argument_problems(space: Mapping[str, Any], model: "ModelFiles") -> list[str]:
    """Check ``training_arguments`` against the class of transformers."""
    from zerolab.extensions.deepspeed_config.training_arguments import training_argument_problems

    return training_argument_problems(space, model)
