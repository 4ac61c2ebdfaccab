"""Secrets of an experiment's configuration: masked wherever it is shown, restored for its runs.

Secrets are values whose name looks like a key, a token, a secret or a password: of a key of
``checkpoint_storage``, of an environment variable, of a key under ``data`` with all that is below
it, and of an assignment or an option in a command (``NAME=value``, ``--name value``). So are
passwords of well-known clients (``mysql -pPASSWORD``) and addresses with a password, a token or a
signature. A command is the entrypoint, an environment variable or a text under ``data``.
Hyperparameters are never masked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerolab.contract.secret_text import (
    MASK,
    forms_of_secret,
    is_secret_name,
    is_secret_url,
    is_secret_value,
    swap_command,
)

__all__ = [
    "find_secrets",
    "mask_secrets",
    "masked_paths",
    "replace_masks",
    "restore_secrets",
]

_COMMAND_LENGTH = 10_000
"""Characters of a text under ``data`` that may be a command; a longer one is a document."""

_Path = tuple[str, ...]
_Swap = Callable[[_Path, Any], Any]


def mask_secrets(config: Mapping[str, Any], *, for_trial: bool = False) -> dict[str, Any]:
    """Copy an experiment's configuration with every secret replaced by :data:`MASK`.

    Args:
        config: As it was submitted, or with its defaults filled in.
        for_trial: Leave ``data`` as it is: the code of a trial reads it.

    Example:
        >>> mask_secrets({"environment": {"environment_variables": ["HF_TOKEN=hf_abc"]}})
        {'environment': {'environment_variables': ['HF_TOKEN=********']}}
    """
    masked = _swapped(config, lambda _path, _value: MASK)
    return masked | {"data": config["data"]} if for_trial and "data" in config else masked


def restore_secrets(config: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration with each :data:`MASK` replaced by the original's secret.

    Args:
        config: Masked, and perhaps changed since.
        original: The configuration as it was submitted.

    Returns:
        A copy in which a mask remains only if the original has no such secret.
    """
    originals: dict[_Path, Any] = {}

    def note(path: _Path, value: Any) -> Any:
        originals[path] = value
        return value

    _swapped(original, note)

    def restore(path: _Path, value: Any) -> Any:
        if value != MASK:
            return value
        # Variables may be one list for all kinds of slots, or a list for each kind.
        other_kinds = (
            originals[key] for key in originals if (key[0], key[-1]) == ("env", path[-1])
        )
        is_variable = path[0] == "env"
        if path in originals or not is_variable:
            return originals.get(path, MASK)
        return next(other_kinds, MASK)

    return _swapped(config, restore)


def replace_masks(config: Mapping[str, Any], value: str) -> dict[str, Any]:
    """Copy a configuration with each mask replaced by a value, if no secret is needed."""
    return _swapped(config, lambda _path, secret: value if secret == MASK else secret)


def find_secrets(config: Mapping[str, Any]) -> list[str]:
    """Return the secret values of a configuration that is not masked, the longest first.

    Of an address these are the address, its login, the password and the secret parameters. Of a
    header with a scheme (``Bearer``) these are the value and what follows the scheme.
    """
    values = {
        form
        for path, value in _secrets(config)
        if value != MASK
        for form in forms_of_secret(path[-1], str(value))
        if form.strip()
    }
    return sorted(values, key=lambda value: (-len(value), value))


def masked_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the secrets of which only the mask is there."""
    return [_TITLES.get(path[0], "") + ".".join(path[1:]) for path, value in _secrets(config)
            if value == MASK]  # fmt: skip


_TITLES = {
    "storage": "checkpoint_storage.",
    "env": "environment.environment_variables.",
    "data": "data.",
}


def _secrets(config: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    secrets: dict[_Path, Any] = {}

    def note(path: _Path, value: Any) -> Any:
        secrets[path] = value
        return value

    _swapped(config, note)
    yield from secrets.items()


def _swapped(config: Mapping[str, Any], swap: _Swap) -> dict[str, Any]:
    """Copy a configuration with each secret replaced by what ``swap`` returns for it."""
    result = dict(config)
    storage = config.get("checkpoint_storage")
    if isinstance(storage, Mapping):
        result["checkpoint_storage"] = {
            key: swap(("storage", key), value)
            if is_secret_name(key) and isinstance(value, str | int | float) and value != ""
            else value
            for key, value in storage.items()
        }
    environment = config.get("environment")
    if isinstance(environment, Mapping) and "environment_variables" in environment:
        variables = _swap_variables(environment["environment_variables"], swap)
        result["environment"] = {**environment, "environment_variables": variables}
    if "entrypoint" in config:
        result["entrypoint"] = _swap_in_command(config["entrypoint"], ("entrypoint",), swap)
    if "data" in config:
        result["data"] = _swap_keys(config["data"], ("data",), swap)
    return result


def _swap_variables(value: Any, swap: _Swap) -> Any:
    if isinstance(value, Mapping):
        return {
            kind: _swap_lines(lines, "cuda" if kind == "gpu" else str(kind), swap)
            for kind, lines in value.items()
        }
    return _swap_lines(value, "", swap)


def _swap_lines(lines: Any, kind: str, swap: _Swap) -> Any:
    if not isinstance(lines, list | tuple):
        return lines
    return [_swap_line(line, ("env", kind) if kind else ("env",), swap) for line in lines]


def _swap_line(line: Any, path: _Path, swap: _Swap) -> Any:
    if not isinstance(line, str):
        return line
    name, _equals, value = line.partition("=")
    if not value:
        return line
    is_secret = is_secret_name(name) or is_secret_url(value) or value == MASK
    if is_secret:
        return f"{name}={swap((*path, name), value)}"
    return f"{name}={_swap_in_command(value, (*path, name), swap)}"


def _swap_in_command(
    value: Any,
    path: _Path,
    swap: _Swap,
    swap_other: Callable[[int, Any], Any] | None = None,
) -> Any:
    *above, name = path

    def swap_part(part: str, secret: str) -> Any:
        return swap((*above, f"{name}: {part}"), secret)

    return swap_command(value, swap_part, swap_other)


def _may_be_command(items: Sequence[Any]) -> bool:
    """Return whether a list has options and is short enough for a command."""
    texts = [item for item in items if isinstance(item, str)]
    return any(word.startswith("-") for word in texts) and sum(map(len, texts)) <= _COMMAND_LENGTH


def _swap_keys(value: Any, path: _Path, swap: _Swap, name: str = "") -> Any:
    """Replace values whose key, or one above it, has a secret's name: the given one."""
    if isinstance(value, Mapping):
        return {
            key: _swap_keys(
                item, (*path, str(key)), swap, str(key) if is_secret_name(str(key)) else name
            )
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _swap_items(value, path, swap, name)
    if name and is_secret_value(name, value):
        return swap(path, value)
    if not isinstance(value, str):
        return value
    if value == MASK or is_secret_url(value):
        return swap(path, value)
    return _swap_in_command(value, path, swap) if len(value) <= _COMMAND_LENGTH else value


def _swap_items(items: Sequence[Any], path: _Path, swap: _Swap, name: str) -> list[Any]:
    def swap_item(index: int, item: Any) -> Any:
        return _swap_keys(item, (*path, str(index)), swap, name)

    if not name and _may_be_command(items):
        swapped: list[Any] = _swap_in_command(list(items), path, swap, swap_item)
        return swapped
    return [swap_item(index, item) for index, item in enumerate(items)]
