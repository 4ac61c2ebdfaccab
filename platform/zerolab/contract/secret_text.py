"""Secrets in text: in commands, addresses, error messages and log lines."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = [
    "MASK",
    "SHORTEST",
    "is_secret_name",
    "is_secret_url",
    "is_secret_value",
    "mask_assignments",
    "mask_values",
    "secrets_of_url",
    "swap_command",
]

MASK = "********"
"""Stands for a secret in every response and log."""

SHORTEST = 6
"""Characters of a value that is masked wherever it occurs; a shorter one only after a name."""

_LOGIN_NAMES = (
    r"SECRET|PASSW(?:OR)?D|SSHPASS|PASSPHRASE|PASSCODE|CREDENTIAL"
    r"|(?<![A-Z])(?:PASS|PW)(?![A-Z])|PWD(?![A-Z])"
)
_NAME = re.compile(
    rf"{_LOGIN_NAMES}|CONN(?:ECTION)?_?STR|AUTHORIZATION|(?:KEYS?|TOKEN)(?![A-Z])"
    r"|(?<![A-Z])(?:PAT|AUTH|DSN|JWT)(?![A-Z])"
)
_NAME_OF_NUMBER = re.compile(_LOGIN_NAMES)
"""Names whose value is a secret even if it is a small number."""
_SMALL_NUMBER = re.compile(r"[0-9]{1,5}(?:\.[0-9]*)?")
"""Value of an option like ``--key-size``, which is no secret."""

_LOGIN_IN_URL = re.compile(r"://([^/\s@:]*:[^/\s]+|[^/\s@:]{16,})@")
"""A user with a password, or a token in place of the user."""
_QUERY_IN_URL = re.compile(r"://[^\s?]{0,200}\?\S+")
_PARAMETERS = re.compile(r"[?&]([\w.-]+)=([^&\s#]+)")

_QUOTED = r"\"(?:\\.|[^\"\\])*\"|'[^']*'"
_VALUE = (
    rf"((?:{_QUOTED})(?:[^\s\"';|&)]+)?"
    rf"|(?:\\.|\$\([^()]*\)|[^\s\"'\\])+(?:(?=[\"'][^\s;|&)])(?:{_QUOTED}))?)"
)
_IN_COMMAND = re.compile(
    rf"(?<![\w-])(-{{0,2}}[A-Za-z_][\w-]*)(=){_VALUE}"  # an assignment
    rf"|(?<![\w-])(--?[A-Za-z_][\w-]+)([ \t]+)(?!-){_VALUE}"  # an option and its value
    r"|(?<![\w+.-])([\w+.-]+)(://)([^\s\"'|;<>()]+)"  # an address
    rf"|(?<=[\"'])([A-Za-z_][\w.-]*)([\"']\s*:\s*)({_QUOTED}|[^\s\"',}}\]]+)"  # a key of JSON
    r"|(?:(?<=[\"'])|^)([A-Za-z_][\w-]*)(\s*:\s+)([^\"'\n]+)"  # a header
)
_REFERENCE = re.compile(r"\"?\$(?:\w+|\{\w+\}|\([^()]*\))\"?")
"""A variable or a command that gives a shell the value."""
_OPTION = re.compile(r"[-+]{0,2}[A-Za-z_][\w.-]*")

_USER = r"[\"']?[^:{S}\"']+:"
_CLIENTS = [
    (r"(?:mysql|mariadb)[\w-]*|7z[ar]?", "-p"),
    (r"sshpass|login|mongo\w*|cqlsh", "-p{S}*"),
    (r"redis-cli", "-a{S}+"),
    (r"curl", rf"(?:-u|--user)(?:{{S}}|=)*{_USER}"),
    (r"curl", rf"(?:-U|--proxy-user)(?:{{S}}|=)*{_USER}"),
    (r"https?", rf"(?:-a|--auth)(?:{{S}}|=)*{_USER}"),
    (r"ldap(?:search|add|modify|delete|whoami|passwd)", "-w{S}*"),
    (r"(?:un)?zip|sqlcmd|bcp|tsql|mosquitto_\w+", "-P{S}*"),
]
"""Well-known clients, and the option before their password; ``{S}`` separates words."""

_Patterns = list[tuple[re.Pattern[str], re.Pattern[str]]]


def _password_patterns(space: str, arguments: str, value: str) -> _Patterns:
    return [
        (
            re.compile(rf"(?<![\w.-])(?:{client})(?={space}){arguments}"),
            re.compile(rf"({space}{option.replace('{S}', space)})({value})"),
        )
        for client, option in _CLIENTS
    ]


_TEXT_OF_CLIENT = _password_patterns(
    r"\s", rf"(?:{_QUOTED}|\\[\s\S]|[^\"'\\;|&\n])*", rf"(?:{_QUOTED}|\\.|[^\s\"'\\;|&])+"
)
_WORDS_OF_CLIENT = _password_patterns(r"\0", r"[\s\S]*", r"[^\0]+")


def _swap_of_clients(text: str, patterns: _Patterns, swap: Callable[[str], str]) -> str:
    """Replace the first password among the arguments of each well-known client."""
    for client, password in patterns:

        def replace(match: re.Match[str], password: re.Pattern[str] = password) -> str:
            return password.sub(lambda found: found[1] + swap(found[2]), match[0], count=1)

        text = client.sub(replace, text)
    return text


def is_secret_name(name: str) -> bool:
    """Return whether a name looks like that of a key, a token, a secret or a password."""
    return _NAME.search(name.upper()) is not None


def is_secret_value(name: str, value: object) -> bool:
    """Return whether the value of a secret's name is one: no flag, and no size of a key."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    if isinstance(value, int | float):
        is_number = abs(value) < 100_000
    else:
        is_number = _SMALL_NUMBER.fullmatch(str(value)) is not None
    return not is_number or _NAME_OF_NUMBER.search(name.upper()) is not None


def is_secret_url(value: str) -> bool:
    """Return whether an address has a password, a token or a signature."""
    if _LOGIN_IN_URL.search(value):
        return True
    return any(
        _is_secret_parameter(name)
        for query in _QUERY_IN_URL.findall(value)
        for name, _value in _PARAMETERS.findall(query)
    )


def _is_secret_parameter(name: str) -> bool:
    return is_secret_name(name) or name.lower().endswith(("sig", "signature"))


def secrets_of_url(value: str) -> Iterator[str]:
    """Return the login, the password and the secret parameters of an address, if it has any."""
    address = value if "://" in value else f"://{value}"
    if not is_secret_url(address):
        return
    for login in _LOGIN_IN_URL.findall(address):
        yield login
        yield login.partition(":")[2] or login
    for name, given in _PARAMETERS.findall(address):
        if _is_secret_parameter(name):
            yield given


def swap_command(value: Any, swap: Callable[[str, str], str]) -> Any:
    """Replace the secrets in a command.

    Args:
        value: A text for a shell, or a list of words. Anything else is returned as it is.
        swap: Gets the name and number of a secret (``--token 2``) and the secret.
    """
    seen: Counter[str] = Counter()

    def swap_next(name: str, given: str) -> str:
        seen[name] += 1
        quote = given[:1] if given[:1] in ("'", '"') and given[-1:] == given[:1] else ""
        inner = given[1:-1] if quote and len(given) > 1 else given
        return f"{quote}{swap(f'{name} {seen[name]}', inner)}{quote}"

    def replace(match: re.Match[str]) -> str:
        name, between, given = (group for group in match.groups() if group is not None)
        if between == "://":
            is_secret = given == MASK or is_secret_url(match[0])
            return f"{name}://{swap_next('url', given)}" if is_secret else match[0]
        if not is_secret_name(name):
            return f"{name}{between}{_IN_COMMAND.sub(replace, given)}"
        if _REFERENCE.fullmatch(given) or not is_secret_value(name, given.strip("\"'")):
            return match[0]
        value = given.rstrip(";|&)") or given
        return f"{name}{between}{swap_next(name, value)}{given[len(value) :]}"

    def swap_password(given: str) -> str:
        return swap_next("password", given)

    def swap_text(text: str) -> str:
        text = _IN_COMMAND.sub(replace, text)
        return _swap_of_clients(text, _TEXT_OF_CLIENT, swap_password)

    if isinstance(value, str):
        return swap_text(value)
    if not isinstance(value, list | tuple):
        return value
    words: list[Any] = []
    for word in value:
        swapped = _swap_word(word, words[-1] if words else None, swap_next)
        # Perhaps a command of its own: bash -c "..."
        words.append(swap_text(word) if swapped is None and isinstance(word, str) else swapped)
    if all(isinstance(word, str) and "\0" not in word for word in words):
        text = _swap_of_clients("\0".join(words), _WORDS_OF_CLIENT, swap_password)
        words = text.split("\0") if words else words
    return words


def _swap_word(word: Any, before: Any, swap_next: Callable[[str, str], str]) -> Any:
    """Replace a word that is an assignment or the value of an option; None for another text."""
    if not isinstance(word, str):
        return word
    name, equals, value = word.partition("=")
    if equals and _OPTION.fullmatch(name) and is_secret_name(name):
        return f"{name}={swap_next(name, value)}" if is_secret_value(name, value) else word
    is_option = isinstance(before, str) and before.startswith("-") and _OPTION.fullmatch(before)
    if is_option and is_secret_name(before) and not word.startswith("-"):
        return swap_next(before, word) if is_secret_value(before, word) else word
    return None


def mask_assignments(text: str) -> str:
    """Mask what looks like secrets in a text of which no configuration is known.

    Example:
        >>> mask_assignments("got 'HF_TOKEN=hf_abc x'")
        "got 'HF_TOKEN=******** x'"
    """
    text = _swap_of_clients(text, _TEXT_OF_CLIENT, lambda _: MASK)
    for pattern in _IN_MESSAGE:
        text = pattern.sub(
            lambda match: f"{match[1]}{MASK}" if is_secret_name(match[1]) else match[0], text
        )
    return text


_IN_MESSAGE = tuple(
    re.compile(pattern)
    for pattern in (
        r"((?<![\w-])-{0,2}[A-Za-z_][\w-]*=['\"]?)([^\s'\",}\]]+)",
        r"((?<![\w-])[A-Za-z_][\w-]*['\"]?: ?['\"]?)([^\s'\",}\]]+)",
        r"(--[A-Za-z_][\w-]*(?:[ \t]+|['\"], ?['\"]))([^-\s'\",}\]][^\s'\",}\]]*)",
    )
)


def mask_values(text: str, values: Iterable[str]) -> str:
    """Put :data:`MASK` in place of secret values in a text, such as a line of a log.

    Values of fewer than :data:`SHORTEST` characters occur by chance. They are masked after a
    secret's name, after a client's option and in the login of an address.
    """
    for value in values:
        if value not in text:
            continue
        if len(value) >= SHORTEST:
            text = text.replace(value, MASK)
        else:
            text = re.sub(_BEFORE_SHORT + re.escape(value) + r"(?!\w)", rf"\g<1>{MASK}", text)
    return text


_BEFORE_SHORT = (
    rf"((?i:{_NAME.pattern})[\w-]*[\"']?(?:\s*[:=]\s*|\s+)[\"']?"
    r"|://[^\s/@:]*:|(?<!\S)-[aAuUpPwW]\s*[\"']?(?:\w+:)?)"
)
