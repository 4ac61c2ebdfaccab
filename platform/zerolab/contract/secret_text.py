"""Secrets in text: in commands, addresses, error messages and log lines."""

import re
import shlex
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import Any, cast

__all__ = [
    "MASK",
    "SHORTEST",
    "forms_of_secret",
    "is_secret_name",
    "is_secret_url",
    "is_secret_value",
    "mask_assignments",
    "mask_values",
    "secrets_of_url",
    "swap_command",
]

MASK = "********"
"""Replaces a secret in every response and log."""

SHORTEST = 6
"""Characters of a value that is masked wherever it occurs; a shorter one only after a name."""


class _LazyPattern:
    """Pattern that is compiled when it is first used: all of them take 4 ms of a start."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __getattr__(self, name: str) -> Any:
        """Return a method of the compiled pattern, and keep it for the next use."""
        method = getattr(re.compile(self.pattern), name)
        setattr(self, name, method)
        return method


def _pattern(pattern: str) -> re.Pattern[str]:
    return cast("re.Pattern[str]", _LazyPattern(pattern))


_LOGIN_NAMES = (
    r"SECRET|PASSW(?:OR)?D|SSHPASS|PASSPHRASE|PASSCODE|CREDENTIAL"
    r"|(?<![A-Z])(?:PASS|PW)(?![A-Z])|PWD(?![A-Z])"
)
_SERVICE = r"API|AUTH|ACCESS|REFRESH|BEARER|HF|HUB|BOT"
_NAME = _pattern(
    rf"{_LOGIN_NAMES}|CONN(?:ECTION)?_?STR|AUTHORIZATION|(?:KEYS?|TOKEN)(?![A-Z])"
    rf"|(?:{_SERVICE})[_-]?TOKENS|(?<![A-Z])COOKIES?(?![A-Z_-])"
    r"|(?<![A-Z])(?:PAT|AUTH|DSN|JWT|BEARER)(?![A-Z])"
)
_HARMLESS_NAME = _pattern(
    r"[_.-](?:FILE|PATH|DIR|STDIN|ENV|NAME|COLUMN|FIELD|TYPE|RATE|RATIO|LOSS|WEIGHT|COUNT"
    r"|SIZE|DIM|LEN|LENGTH|INDEX|IDX)S?$"
    r"|(?<![A-Z])(?:SORT|PRIMARY|FOREIGN|PUBLIC|LABEL|INPUT|OUTPUT|TARGET|TEXT|IMAGE|AUDIO|VIDEO"
    r"|PROMPT|RESPONSE|CHOSEN|REJECTED|MONITOR|METRIC|QUERY|FEATURE|REWARD|MESSAGES?)[_-]?KEYS?$"
    r"|(?<![A-Z])(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|EOT|END|START|STOP|SPECIAL|IMAGE|AUDIO|VIDEO"
    r"|PER|NEXT|FIRST|LAST)[_-]?TOKEN(?:$|[_-])"
)
"""Names of options of training scripts and of places that hold a secret elsewhere."""
_NAME_OF_NUMBER = _pattern(_LOGIN_NAMES)
"""Names whose value is a secret even if it is a small number."""
_NO_SECRET = _pattern(r"(?i:true|false|none|null|yes|no)")
_SMALL_NUMBER = _pattern(r"[0-9]{1,5}(?:\.[0-9]*)?")
"""Value of an option like ``--key-size``, which is no secret."""

_LOGIN_IN_URL = _pattern(r"://([^/\s@:]*:[^/\s]+|[^/\s@:]{16,})@")
"""A user with a password, or a token in place of the user."""
_QUERY_IN_URL = _pattern(r"://(?:(?!://)[^\s?])*\?\S+")
_PARAMETERS = _pattern(r"[?&]([\w.-]+)=([^&\s#]+)")

_CONTINUED = r"\\\r?\n"
"""The end of a line that the next line continues."""
_QUOTED = r"\"(?:\\[\s\S]|[^\"\\])*\"|'[^']*'"
_ESCAPED = rf"\\[^\r\n]|{_CONTINUED}(?=\S)|\$\([^()]*\)|`[^`\n]*`"
_CLOSING = r"[\"'](?:[\s;|&)]|\Z|[,:](?:\s|[\"'\[{])|[}\]]+(?:[\s,\"']|\Z))"
"""A quote that closes a text or a value of JSON that began before a secret in it."""
_NEXT_QUOTED = rf"(?!{_CLOSING})(?:{_QUOTED})"
_VALUE = (
    rf"(?:{_QUOTED}|(?:{_ESCAPED}|[^\s\"'\\;|&)])+)"
    rf"(?:{_NEXT_QUOTED}|{_ESCAPED}|[^\s\"'\\;|&)])*"
)
_NAME_IN_COMMAND = _pattern(
    r"(?<!\S)(?:-H\s*|--header(?:=|\s+))"
    r"(?:[\"'](?P<quoted>[A-Za-z_][\w-]*)|(?P<argument>[A-Za-z_][\w-]*)):\s*"
    r"|(?<![\w-])(?P<assignment>-{0,2}[A-Za-z_][\w-]*)[\"']?="
    rf"|(?<![\w-])(?P<option>--?[A-Za-z_][\w-]+)(?:[ \t]|{_CONTINUED})+"
    rf"(?!{_CONTINUED}|[-\s;|&)]|\d*[<>])"
    r"|(?<![\w+.-])(?P<scheme>[\w+.-]+)://"
    r"|(?<=[\"'])(?P<key>[A-Za-z_][\w.-]*)\\*[\"']\s*:\s*"  # of JSON
    r"|(?:\{[ \t]*|,[ \t]+)(?P<field>[A-Za-z_][\w.-]*):\s*"  # of YAML
    r"|(?:(?<=[\"'])|^|(?<=\n)[ \t]*)(?P<header>[A-Za-z_][\w.-]*)\s*:\s+"
)
_VALUES = {
    "assignment": _pattern(_VALUE),
    "option": _pattern(_VALUE),
    "scheme": _pattern(r"(?:[^\s\"'|;<>()&]|&(?![&\s]|\Z))+"),
    "key": _pattern(r"[^\s\"',}\]]+"),
    "field": _pattern(r"[^\s\"',}\]]+"),
    "header": _pattern(r"\"[^\"\n]*\"|'[^'\n]*'|[^\"'\n]+"),
    "quoted": _pattern(r"[^\"'\n]+"),
    "argument": _pattern(_VALUE),
}
"""Values after a name, by the group of ``_NAME_IN_COMMAND``."""
_NEXT_VALUE = _pattern(rf"(?:[ \t]|{_CONTINUED})+(?![-\s;|&)]|\d*[<>])({_VALUE})")
_LIST_NAME = _pattern(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S$")
"""Names of options that take several values."""
_NESTED = _pattern(r"(?P<quote>\\*[\"'])|(?P<open>[\[{])|(?P<close>[\]}])|[^\s,:\[\]{}\"'\\]+")
"""Tokens of a list or a mapping of JSON or YAML."""
_AFTER_KEY = _pattern(r"\s*:")
_QUOTE = _pattern(r"(\\*)([\"'])")
_LINE_OF_LIST = _pattern(r"[ \t]*-[ \t]+([\"']?)([^\"'\n]+)\1[ \t]*(?:\n|\Z)")
"""An item of a list of YAML on a line of its own."""
_REFERENCE = _pattern(r"\"?(?:\$(?:\w+|\{\w+\}|\([^()]*\))|`[^`]*`)\"?")
"""A variable or a command that gives a shell the value."""
_HEADER = _pattern(r"([A-Za-z_][\w-]*):\s*([^\n]+)")
_OPTION = _pattern(r"[-+]{0,2}[A-Za-z_][\w.-]*")
_PASSWORD_OPTION = _pattern(
    r"-[pPw](?!ass|at(?![a-z])|w|g|re|rivate|roxy|rimary|ublic|roject|rovider|andb|eb)[\w.-]"
)
"""Perhaps an option of one letter with its password (``-pPASSWORD``), not a long name."""

_USER = r"[\"']?[^:={C}\"'][^:={C}\"']*:"
_WORD = "[^{C}]+"
_CLIENTS = [
    (r"(?:mysql|mariadb)[\w-]*|7z[ar]?", "{S}-p"),
    (r"sshpass", rf"sshpass(?:{{S}}+-(?:[evV]+|[fdP]{{S}}*{_WORD}))*{{S}}+-[evV]*p{{S}}*"),
    (r"login|mongo\w*|cqlsh", "{S}-p{S}*"),
    (r"redis-cli", "{S}-a{S}+"),
    (r"curl", rf"{{S}}(?:-u|--user)(?:{{S}}|=)*{_USER}"),
    (r"curl", rf"{{S}}(?:-U|--proxy-user)(?:{{S}}|=)*{_USER}"),
    (r"https?", rf"{{S}}(?:-a|--auth)(?:{{S}}|=)*{_USER}"),
    (r"ldap(?:search|add|modify|delete|whoami|passwd)", "{S}-w{S}*"),
    (r"(?:un)?zip|sqlcmd|bcp|tsql|mosquitto_\w+", "{S}-P{S}*"),
    (r"wandb", rf"wandb{{S}}+login(?:{{S}}+-{_WORD})*{{S}}+(?!-)"),
    (r"aws", r"{S}aws_(?:access_key_id|secret_access_key|session_token){S}+"),
    (r"machine", rf"{{S}}login{{S}}+{_WORD}{{S}}+password{{S}}+"),
]
"""Well-known clients and the option before their password; ``{S}`` separates words.

``{C}`` is the character in ``{S}``.
"""

_Patterns = list[tuple[re.Pattern[str], re.Pattern[str]]]
_Span = tuple[int, int]
_Secret = tuple[str, int, int]
"""The name of a secret, its start and its end in the text."""


def _password_patterns(character: str, space: str, arguments: str, value: str) -> _Patterns:
    return [
        (
            re.compile(rf"(?<![\w.-])(?:{client})(?={space}){arguments}"),
            re.compile(
                rf"{option.replace('{S}', space).replace('{C}', character)}"
                rf"(?P<password>{value})"
            ),
        )
        for client, option in _CLIENTS
    ]


@cache
def _patterns_in_text() -> _Patterns:  # not at import: 24 patterns take 4 ms
    return _password_patterns(
        r"\s",
        rf"(?:\s|{_CONTINUED})",
        rf"(?:{_QUOTED}|\\[\s\S]|[^\"'\\;|&\n])*",
        rf"(?:{_QUOTED}|(?:{_ESCAPED}|[^\s\"'\\;|&])+)(?:{_NEXT_QUOTED}|{_ESCAPED}|[^\s\"'\\;|&])*",
    )


@cache
def _patterns_in_words() -> _Patterns:
    return _password_patterns(r"\0", r"\0", r"[\s\S]*", r"[^\0]+")


def _client_passwords(text: str, patterns: _Patterns) -> list[_Span]:
    """Find the first password among the arguments of each well-known client, in order."""
    matches = []
    for client, password in patterns:
        for command in client.finditer(text):
            match = password.search(text, *command.span())
            if match and not _REFERENCE.fullmatch(match["password"]):
                matches.append((*match.span("password"), match.start(), command.start()))
    spans: list[_Span] = []
    for start, end, option_start, client_start in sorted(matches):
        before = bisect_left(spans, (client_start + 1,))
        is_in_password = before > 0 and client_start < spans[before - 1][1]
        if not is_in_password and (not spans or option_start >= spans[-1][1]):
            spans.append((start, end))
    return spans


def _replace(text: str, replacements: Iterable[tuple[int, int, str]]) -> str:
    """Replace parts of a text, given by start and end in order."""
    parts = []
    done = 0
    for start, end, replacement in replacements:
        parts += [text[done:start], replacement]
        done = end
    return "".join([*parts, text[done:]])


def is_secret_name(name: str) -> bool:
    """Return whether a name looks like that of a key, a token, a secret or a password."""
    name = name.upper()
    return _NAME.search(name) is not None and _HARMLESS_NAME.search(name) is None


def is_secret_value(name: str, value: object) -> bool:
    """Return whether the value of a secret's name is one: no flag, and no size of a key."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    if isinstance(value, int | float):
        is_number = abs(value) < 100_000
    else:
        if _NO_SECRET.fullmatch(str(value)):
            return False
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
    for name, secret in _PARAMETERS.findall(address):
        if _is_secret_parameter(name):
            yield secret


def swap_command(
    value: Any,
    swap: Callable[[str, str], str],
    swap_other: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Replace the secrets in a command.

    Args:
        value: A text for a shell, or a list of words. Anything else is returned as it is.
        swap: Gets the name and number of a secret (``--token 2``) and the secret.
        swap_other: Gets the index and the word of a list that is no assignment, no value of an
            option and no password. By default such a word is replaced like a text.
    """
    seen: Counter[str] = Counter()

    def swap_next(name: str, quoted: str) -> str:
        is_quoted = len(quoted) > 1 and quoted[0] in "'\"" and quoted[0] == quoted[-1]
        quote = quoted[0] if is_quoted else ""
        secret = quoted[1:-1] if is_quoted else quoted
        if not secret.strip():
            return quoted
        seen[name] += 1
        return f"{quote}{swap(f'{name} {seen[name]}', secret)}{quote}"

    def swap_text(text: str) -> str:
        secrets = _secrets_in_text(text)
        return _replace(text, ((a, b, swap_next(name, text[a:b])) for name, a, b in secrets))

    if isinstance(value, str):
        return swap_text(value)
    if not isinstance(value, list | tuple):
        return value
    secrets = _secrets_in_words(value)
    replaced: list[Any] = []
    for index, word in enumerate(value):
        if index in secrets:
            name, start, end = secrets[index]
            replaced.append(f"{word[:start]}{swap_next(name, word[start:end])}{word[end:]}")
        elif swap_other:
            replaced.append(swap_other(index, word))
        else:
            # Perhaps a command itself: bash -c "..."
            replaced.append(swap_text(word) if isinstance(word, str) else word)
    return replaced


def _secrets_in_text(text: str) -> list[_Secret]:
    """Find the secrets of a text for a shell, in order."""
    named = list(_named_secrets(text))
    # A named value may look like a client or an option: search without it.
    blank = _replace(text, ((start, end, "*" * (end - start)) for (_, start, end), _ in named))
    passwords = deque(("password", *span) for span in _client_passwords(blank, _patterns_in_text()))
    secrets: list[_Secret] = []
    for secret, head in named:
        while passwords and passwords[0][2] <= head:
            secrets.append(passwords.popleft())
        if passwords and passwords[0][1] < secret[2]:
            if passwords[0][1] <= head or _PASSWORD_OPTION.match(text, head):
                continue
            passwords.popleft()
        secrets.append(secret)
    return [*secrets, *passwords]


def _named_secrets(text: str) -> Iterator[tuple[_Secret, int]]:
    """Find the values of names, with the start of the name."""
    at = 0
    while name := _NAME_IN_COMMAND.search(text, at):
        at = name.end()
        kind = name.lastgroup or ""
        title = name[kind]
        # No recursion: the value of another name is searched like the text after it.
        if kind != "scheme" and not _is_secret_name_in_command(kind, title):
            continue
        spans, at = _values_after_name(text, at, kind, title)
        if kind == "scheme":
            title = "url"
            is_url = is_secret_url(text[name.start() : at])
        for start, end in spans:
            value = text[start:end]
            if kind == "scheme":
                is_secret = value == MASK or is_url
            else:
                is_reference = _REFERENCE.fullmatch(value)
                is_secret = not is_reference and is_secret_value(title, value.strip("\"'"))
            if is_secret:
                yield (title, start, end), name.start()


def _values_after_name(text: str, at: int, kind: str, name: str) -> tuple[list[_Span], int]:
    """Return the values of a name and the index of the text after them."""
    if kind in ("key", "field", "header") and text[at : at + 1] in ("[", "{"):
        return _nested_values(text, at)
    quote = _QUOTE.match(text, at) if kind in ("key", "field") else None
    if quote:
        closing = _closing_quote(text, quote[0], quote.end())
        end = closing.start() if closing else quote.end()
        return [(quote.end(), end)], closing.end() if closing else end
    spans: list[_Span] = []
    if kind == "header":
        while item := _LINE_OF_LIST.match(text, at):
            spans.append(item.span(2))
            at = item.end()
        if spans:
            return spans, at
    match = _VALUES[kind].match(text, at)
    while match:
        spans.append(match.span(match.lastindex or 0))
        at = match.end()
        is_list = kind == "option" and _LIST_NAME.search(name.upper())
        match = _NEXT_VALUE.match(text, at) if is_list else None
    return spans, at


def _nested_values(text: str, at: int) -> tuple[list[_Span], int]:
    """Return the values in a list or a mapping that begins here, and its end."""
    spans: list[_Span] = []
    depth = 0
    while token := _NESTED.search(text, at):
        start, end = token.span()
        at = end
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
            if not depth:
                break
            continue
        if token["quote"]:
            closing = _closing_quote(text, token["quote"], end)
            if not closing:
                # The quote closes the text around an incomplete list.
                return spans, start
            (start, end), at = (end, closing.start()), closing.end()
        if not _AFTER_KEY.match(text, at):
            spans.append((start, end))
    return spans, at


def _closing_quote(text: str, quote: str, at: int) -> re.Match[str] | None:
    """Find the quote that closes another one, which a shell may have escaped."""
    depth = len(quote) - 1
    for match in _QUOTE.finditer(text, at):
        escapes = len(match[1])
        is_closing = escapes == depth if depth or quote == "'" else escapes % 2 == 0
        if match[2] == quote[-1] and is_closing:
            return match
    return None


def _is_secret_name_in_command(kind: str, name: str) -> bool:
    if kind == "option" and _PASSWORD_OPTION.match(name):
        return False
    return is_secret_name(name)


def _secrets_in_words(arguments: Sequence[Any]) -> dict[int, _Secret]:
    """Find the words of a command with a secret, by their index; none in other texts."""
    named: dict[int, _Secret] = {}
    texts: list[str] = []
    before: Any = None
    for index, word in enumerate(arguments):
        secret = _secret_of_word(word, before)
        if secret:
            named[index] = secret
        is_list = isinstance(before, str) and _LIST_NAME.search(before.upper())
        if not (secret and secret[1] == 0 and is_list):
            before = word
        is_text = isinstance(word, str) and "\0" not in word
        texts.append("" if not is_text else "*" if secret and secret[1] == 0 else word)
    starts = list(accumulate((len(text) + 1 for text in texts), initial=0))
    secrets = dict(named)
    for start, end in reversed(_client_passwords("\0".join(texts), _patterns_in_words())):
        index = bisect_right(starts, start) - 1
        offset = start - starts[index]
        is_option = index + 1 in named and named[index + 1][1] == 0
        is_named = index in named and offset > 0 and not _PASSWORD_OPTION.match(arguments[index])
        if not is_option and not is_named and texts[index] != "*":
            secrets[index] = ("password", offset, end - starts[index])
    return secrets


def _secret_of_word(word: Any, before: Any) -> _Secret | None:
    """Find the secret of an assignment or of an option before the word."""
    if not isinstance(word, str):
        return None
    name, equals, value = word.partition("=")
    if equals and _OPTION.fullmatch(name) and is_secret_name(name):
        is_secret = is_secret_value(name, value)
        return (name, len(name) + 1, len(word)) if is_secret else None
    if not isinstance(before, str) or not before.startswith("-") or word.startswith("-"):
        return None
    header = _HEADER.fullmatch(word) if before in ("-H", "--header") else None
    if header and is_secret_name(header[1]) and is_secret_value(header[1], header[2]):
        return header[1], header.start(2), len(word)
    if not _OPTION.fullmatch(before) or not _is_secret_name_in_command("option", before):
        return None
    return (before, 0, len(word)) if is_secret_value(before, word) else None


def forms_of_secret(name: str, value: str) -> Iterator[str]:
    """Return a secret in the forms in which logs may show it.

    These are the text, the text as a shell reads it, what follows the scheme of a header
    (``Bearer``), and the parts of an address.
    """
    yield value
    if len(value) <= _LONGEST_QUOTED and any(mark in value for mark in "\"'\\"):
        with suppress(ValueError):
            arguments = shlex.split(value)
            yield arguments[0] if len(arguments) == 1 else value
    *scheme, credentials = value.split() or [""]
    if scheme and ("AUTHORIZATION" in name.upper() or _SCHEME.fullmatch(" ".join(scheme))):
        yield credentials
    yield from secrets_of_url(value)
    if value.startswith(("[", "{")):
        yield from (value[start:end] for start, end in _nested_values(value, 0)[0])
    elif _IS_LIST.search(name.upper()):
        yield from (part.strip() for part in value.split(","))
    elif assignment := _NEXT_ASSIGNMENT.search(value):
        yield value[: assignment.start()]


_NEXT_ASSIGNMENT = _pattern(r",[A-Za-z_][\w.-]*=")
_IS_LIST = _pattern(rf"{_LIST_NAME.pattern[:-1]}(?: \d+)?$")
_LONGEST_QUOTED = 10_000
"""Characters of a value that is read like a shell reads it."""
_SCHEME = _pattern(r"(?i:(?:[\w-]+: ?)?(?:bearer|basic|token|bot|key|api-?key|ssws|splunk))")


def mask_assignments(text: str) -> str:
    """Mask what looks like secrets in a text of which no configuration is known.

    Example:
        >>> mask_assignments("got 'HF_TOKEN=hf_abc x'")
        "got 'HF_TOKEN=******** x'"
    """
    text = _replace(text, ((*span, MASK) for span in _client_passwords(text, _patterns_in_text())))
    for name, value in _IN_MESSAGE:
        text = _replace(text, _values_in_message(text, name, value))
    return text


def _values_in_message(
    text: str, names: re.Pattern[str], values: re.Pattern[str]
) -> Iterator[tuple[int, int, str]]:
    at = 0
    while name := names.search(text, at):
        at = name.end()
        if not is_secret_name(name[0]):
            continue
        if text[at : at + 1] in ("[", "{"):
            spans, at = _nested_values(text, at)
            yield from ((*span, MASK) for span in spans)
        elif value := values.match(text, at):
            at = value.end()
            yield *value.span(), MASK


_IN_MESSAGE = tuple(
    (_pattern(name), _pattern(value))
    for name, value in (
        (r"(?<![\w-])-{0,2}[A-Za-z_][\w-]*=['\"]?", r"[^\s'\",}\]]+"),
        (r"(?<![\w-])[A-Za-z_][\w-]*['\"]?: ?['\"]?", r"[^\s'\",}\]]+"),
        (
            rf"(?<![\w-])--[A-Za-z_][\w-]*(?:(?:[ \t]|{_CONTINUED})+|['\"], ?['\"])",
            r"[^-\s'\",}\]][^\s'\",}\]]*",
        ),
    )
)
"""Names in a message, and the values after them."""


def mask_values(text: str, values: Iterable[str]) -> str:
    """Replace secret values by :data:`MASK` in a text, such as a line of a log.

    Values of fewer than :data:`SHORTEST` characters occur by chance. They are masked after a
    secret's name, after a client's option and in the login of an address.
    """
    for value in values:
        if not value or value not in text:
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
