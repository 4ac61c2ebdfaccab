"""Hyperparameters as overrides of Hydra: ``{hydra_overrides}`` in a command as entrypoint.

``python train.py {hydra_overrides}`` starts ``python train.py lr=0.1 model.dim=64``.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerolab.contract.hparam_reads import join
from zerolab.errors import ConfigError

__all__ = ["PLACEHOLDER", "expand"]

PLACEHOLDER = "{hydra_overrides}"
"""Argument of a command that overrides replace."""

_KEY = re.compile(r"\+{0,2}[A-Za-z_][\w/@.-]*")
_ITEM_KEY = re.compile(r"[A-Za-z_][\w-]*")


def expand(words: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """Replace the placeholder by an override for each hyperparameter.

    Args:
        words: Arguments of a command.
        hparams: Hyperparameters of the trial, nested.

    Returns:
        The arguments; unchanged without the placeholder.

    Raises:
        ConfigError: With every name that Hydra cannot override.

    Example:
        >>> from zerolab.extensions.hydra_overrides import expand
        >>> expand(["train.py", "{hydra_overrides}"], {"lr": 0.1, "model": {"dims": [8, 4]}})
        ['train.py', 'lr=0.1', 'model.dims=[8,4]']
    """
    if PLACEHOLDER not in words:
        return list(words)
    leaves = list(_leaves(hparams))
    problems = [problem for name, value in leaves for problem in _problems(name, value)]
    if problems:
        raise ConfigError("hyperparameters", problems)
    overrides = [f"{name}={_value(value)}" for name, value in leaves]
    return [item for word in words for item in (overrides if word == PLACEHOLDER else [word])]


def _leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        name = join(path, key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def _problems(name: str, value: Any) -> Iterator[str]:
    allowed = "must be letters, digits and `_-./@` to be an override of Hydra"
    if not _KEY.fullmatch(name):
        yield f"hyperparameters.{name}: the name {allowed}, got {name!r}; rename it"
    for key in _keys(value):
        if not _ITEM_KEY.fullmatch(key):
            yield f"hyperparameters.{name}: the key {allowed}, got {key!r}; rename it"


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of mappings in lists."""
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _keys(item)


def _value(value: Any) -> str:
    """Write a value in the grammar of Hydra's command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(item)}" for key, item in value.items()) + "}"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """Quote a text that Hydra and then OmegaConf read, which would resolve ``${name}``."""
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    # Hydra reads backslashes as escapes only before a quote.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", literal)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"
