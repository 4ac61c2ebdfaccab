"""Secrets of an experiment's configuration: masked wherever it is shown, restored for its runs.

Secrets are the credentials of ``checkpoint_storage``, and values whose name looks like a key, a
token, a secret or a password: of an environment variable, of an assignment or an option in the
entrypoint (``NAME=value``, ``--name value``), and of a key under ``data`` with all that is below
it. So are addresses with a password, a token or a signature in these places. Hyperparameters are
never masked.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "MASK",
    "SHORTEST",
    "STORAGE_SECRETS",
    "find_secrets",
    "is_secret_name",
    "mask_assignments",
    "mask_secrets",
    "mask_values",
    "masked_places",
    "replace_masks",
    "restore_secrets",
]

MASK = "********"
"""Stands for a secret in every response and log."""

STORAGE_SECRETS = ("access_key", "secret_key", "connection_string", "credential")
"""Keys of ``checkpoint_storage`` that hold credentials."""

_NAME = re.compile(
    r"SECRET|PASSW(OR)?D|SSHPASS|PASSPHRASE|CREDENTIAL|CONN(ECTION)?_?STR"
    r"|(KEYS?|TOKEN|PWD)(?![A-Z])|(?<![A-Z])(PASS|PAT|AUTH|DSN)(?![A-Z])"
)
_LOGIN_IN_URL = re.compile(r"://(?:[^/\s@]*:[^/\s@]+|[^/\s@:]{16,})@")
"""A user with a password, or a token in place of the user."""
_QUERY_IN_URL = re.compile(r"://[^\s?]*\?\S+")
_PARAMETER = re.compile(r"[?&]([\w.-]+)=[^&\s]")
_OPTION = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
_NAMES = r"(?<![\w-])(?:(-{0,2}[A-Za-z_][\w-]*)(=)|(--[A-Za-z_][\w-]*)([ \t]+)(?!-))"
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s\"']+)"
_IN_COMMAND = re.compile(rf"{_NAMES}{_VALUE}|([A-Za-z][\w+.-]*)(://)([^\s\"'|;<>()]+)")
"""An assignment, an option with its value, or an address."""
_NUMBER = re.compile(r"[0-9]{1,5}")
"""Value of an option like ``--key-size``, which is no secret."""
SHORTEST = 6
"""Characters of a value that is looked for in other text; shorter ones occur by chance."""

_Place = tuple[str, ...]
_Swap = Callable[[_Place, str], str]


def is_secret_name(name: str) -> bool:
    """Return whether a name looks like that of a key, a token, a secret or a password."""
    return _NAME.search(name.upper()) is not None


def _is_secret_url(value: str) -> bool:
    if _LOGIN_IN_URL.search(value):
        return True
    return any(
        is_secret_name(name) or name.lower().endswith(("sig", "signature"))
        for query in _QUERY_IN_URL.findall(value)
        for name in _PARAMETER.findall(query)
    )


def mask_secrets(config: Mapping[str, Any], *, for_trial: bool = False) -> dict[str, Any]:
    """Copy an experiment's configuration with :data:`MASK` in place of every secret.

    Args:
        config: As it was submitted, or with its defaults filled in.
        for_trial: Leave ``data`` as it is: the code of a trial reads it.

    Example:
        >>> mask_secrets({"environment": {"environment_variables": ["HF_TOKEN=hf_abc"]}})
        {'environment': {'environment_variables': ['HF_TOKEN=********']}}
    """
    masked = _swapped(config, lambda _place, _value: MASK)
    return masked | {"data": config["data"]} if for_trial and "data" in config else masked


def restore_secrets(config: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration with the original's secrets where :data:`MASK` stands.

    Args:
        config: Masked, and perhaps changed since.
        original: The configuration as it was submitted.

    Returns:
        A copy in which the mask stands only where the original has no such secret.
    """
    known: dict[_Place, str] = {}

    def note(place: _Place, value: str) -> str:
        known[place] = value
        return value

    _swapped(original, note)

    def restore(place: _Place, value: str) -> str:
        if value != MASK:
            return value
        # Variables may be one list for all kinds of slots, or a list for each kind.
        other_kinds = (known[each] for each in known if (each[0], each[-1]) == ("env", place[-1]))
        is_variable = place[0] == "env"
        return known.get(place) or (next(other_kinds, MASK) if is_variable else MASK)

    return _swapped(config, restore)


def replace_masks(config: Mapping[str, Any], value: str) -> dict[str, Any]:
    """Copy a configuration with a value in place of each mask, where no secret is needed."""
    return _swapped(config, lambda _place, given: value if given == MASK else given)


def find_secrets(config: Mapping[str, Any]) -> list[str]:
    """Return the secret values of a configuration that is not masked, the longest first."""
    return sorted({value for _, value in _places(config) if value != MASK}, key=lambda v: -len(v))


def masked_places(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the secrets of which only the mask is there."""
    return [_TITLES.get(place[0], "") + ".".join(place[1:]) for place, value in _places(config)
            if value == MASK]  # fmt: skip


def mask_assignments(text: str) -> str:
    """Mask what looks like secrets in a text of which no configuration is known.

    Example:
        >>> mask_assignments("got 'HF_TOKEN=hf_abc x'")
        "got 'HF_TOKEN=******** x'"
    """
    for pattern in _IN_TEXT:
        text = pattern.sub(
            lambda found: f"{found[1]}{MASK}" if is_secret_name(found[1]) else found[0], text
        )
    return text


_IN_TEXT = tuple(
    re.compile(pattern)
    for pattern in (
        r"((?<![\w-])-{0,2}[A-Za-z_][\w-]*=['\"]?)([^\s'\",}\]]+)",
        r"((?<![\w-])[A-Za-z_][\w-]*['\"]?: ?['\"]?)([^\s'\",}\]]+)",
        r"(--[A-Za-z_][\w-]*(?:[ \t]+|['\"], ?['\"]))([^-\s'\",}\]][^\s'\",}\]]*)",
    )
)


def mask_values(text: str, values: Iterable[str]) -> str:
    """Put :data:`MASK` in place of secret values in a text, such as a line of a log."""
    for value in values:
        if len(value) >= SHORTEST and value in text:
            text = text.replace(value, MASK)
    return text


_TITLES = {
    "storage": "checkpoint_storage.",
    "env": "environment.environment_variables.",
    "entrypoint": "entrypoint: ",
    "data": "data.",
}


def _places(config: Mapping[str, Any]) -> Iterator[tuple[_Place, str]]:
    found: dict[_Place, str] = {}

    def note(place: _Place, value: str) -> str:
        found[place] = value
        return value

    _swapped(config, note)
    yield from found.items()


def _swapped(config: Mapping[str, Any], swap: _Swap) -> dict[str, Any]:
    """Copy a configuration with each secret replaced by what ``swap`` returns for it."""
    result = dict(config)
    storage = config.get("checkpoint_storage")
    if isinstance(storage, Mapping):
        result["checkpoint_storage"] = {
            key: swap(("storage", key), value)
            if key in STORAGE_SECRETS and isinstance(value, str)
            else value
            for key, value in storage.items()
        }
    environment = config.get("environment")
    if isinstance(environment, Mapping) and "environment_variables" in environment:
        variables = _swap_variables(environment["environment_variables"], swap)
        result["environment"] = {**environment, "environment_variables": variables}
    if "entrypoint" in config:
        result["entrypoint"] = _swap_words(config["entrypoint"], swap)
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


def _swap_line(line: Any, place: _Place, swap: _Swap) -> Any:
    if not isinstance(line, str):
        return line
    name, equals, value = line.partition("=")
    is_secret = value and (is_secret_name(name) or _is_secret_url(value))
    if not equals or not (is_secret or value == MASK):
        return line
    return f"{name}={swap((*place, name), value)}"


def _swap_words(value: Any, swap: _Swap) -> Any:
    """Replace the values of assignments and options in a command: text, or a list of words."""
    seen: Counter[str] = Counter()

    def swap_next(name: str, given: str) -> str:
        seen[name] += 1
        return swap(("entrypoint", name, str(seen[name])), given)

    def replace(found: re.Match[str]) -> str:
        name, between, given = (each for each in found.groups() if each is not None)
        if between == "://":
            is_secret = given == MASK or _is_secret_url(found[0])
            return f"{name}://{swap_next('url', given)}" if is_secret else found[0]
        if not is_secret_name(name):
            return f"{name}{between}{_IN_COMMAND.sub(replace, given)}"
        return found[0] if _NUMBER.fullmatch(given) else f"{name}{between}{swap_next(name, given)}"

    if isinstance(value, str):
        return _IN_COMMAND.sub(replace, value)
    if not isinstance(value, list | tuple):
        return value
    words: list[Any] = []
    for word in value:
        before = words[-1] if words else None
        swapped = _swap_word(word, before, swap_next)
        if swapped is None and isinstance(word, str):  # perhaps a command of its own: bash -c "..."
            swapped = _IN_COMMAND.sub(replace, word)
        words.append(word if swapped is None else swapped)
    return words


def _swap_word(word: Any, before: Any, swap_next: Callable[[str, str], str]) -> str | None:
    """Replace a word that is an assignment or the value of an option; None for any other."""
    if not isinstance(word, str) or _NUMBER.fullmatch(word.partition("=")[2] or word):
        return None
    name, equals, value = word.partition("=")
    if equals and value and _OPTION.fullmatch(name) and is_secret_name(name):
        return f"{name}={swap_next(name, value)}"
    is_option = isinstance(before, str) and before.startswith("--") and _OPTION.fullmatch(before)
    if is_option and is_secret_name(before) and not word.startswith("-"):
        return swap_next(before, word)
    return None


def _swap_keys(value: Any, place: _Place, swap: _Swap, *, secret: bool = False) -> Any:
    """Replace texts whose key, or one above it, has a secret's name."""
    if isinstance(value, Mapping):
        return {
            key: _swap_keys(
                each, (*place, str(key)), swap, secret=secret or is_secret_name(str(key))
            )
            for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [
            _swap_keys(each, (*place, str(i)), swap, secret=secret) for i, each in enumerate(value)
        ]
    if not isinstance(value, str) or not value:
        return value
    return swap(place, value) if secret or value == MASK or _is_secret_url(value) else value
