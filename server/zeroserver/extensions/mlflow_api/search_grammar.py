"""MLflow's search grammar: filters and orders of runs and experiments.

A filter is a conjunction of comparisons, such as ``metrics.loss < 1 AND tags.team = 'vision'``.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from zerolab.errors import ConfigError

__all__ = ["Comparison", "Order", "parse_filter", "parse_order", "sorted_items"]

Values = Mapping[tuple[str, str], Any]
"""Kind and key to the value of a run or an experiment."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<quoted>`[^`]*`)
    |(?P<comparator>!=|<>|<=|>=|=|<|>)
    |(?P<mark>[(),])
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./-]))
    |(?P<word>(?:[^\s=<>!(),'"`]|[`"][^`"]*[`"])+)
    )""",
    re.VERBOSE,
)
_KINDS = {
    "metric": ("metric", "metrics"),
    "param": ("param", "params", "parameter", "parameters"),
    "tag": ("tag", "tags"),
    "attribute": ("attribute", "attributes", "attr", "run"),
}
_KIND_OF = {alias: kind for kind, aliases in _KINDS.items() for alias in aliases}
_ATTRIBUTES = {"Created": "start_time", "run name": "run_name", "Run name": "run_name"}
_NUMBERS = frozenset({"start_time", "end_time", "creation_time", "last_update_time"})
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
_MAX_CHARACTERS = 6000


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of one value."""

    kind: str
    key: str
    comparator: str
    value: Any

    def matches(self, values: Values) -> bool:
        """Check the value of a run or an experiment; a missing one matches only IS NULL."""
        actual = values.get((self.kind, self.key))
        if self.comparator in {"IS NULL", "IS NOT NULL"}:
            return (actual is None) == (self.comparator == "IS NULL")
        if actual is None:
            return False
        if self.comparator in {"IN", "NOT IN"}:
            return (actual in self.value) == (self.comparator == "IN")
        if self.comparator in {"LIKE", "ILIKE"}:
            return _like(self.value, str(actual), ignore_case=self.comparator == "ILIKE")
        return _COMPARE[self.comparator](actual, self.value)


class Order(msgspec.Struct, frozen=True):
    """Key of an order."""

    kind: str
    key: str
    ascending: bool


def _like(pattern: str, text: str, *, ignore_case: bool) -> bool:
    """Match a pattern with ``%`` and ``_``, in time proportional to both lengths at most."""
    if ignore_case:
        pattern, text = pattern.lower(), text.lower()
    at, star, matched, here = 0, -1, 0, 0
    while here < len(text):
        if at < len(pattern) and pattern[at] == "%":
            star, matched = at, here
            at += 1
        elif at < len(pattern) and pattern[at] in ("_", text[here]):
            at, here = at + 1, here + 1
        elif star >= 0:
            matched += 1
            at, here = star + 1, matched
        else:
            return False
    return not pattern[at:].strip("%")


def parse_filter(text: str, attributes: Sequence[str]) -> list[Comparison]:
    """Parse a filter into comparisons that must all match.

    Args:
        text: The filter; empty matches everything.
        attributes: Names of the attributes.

    Raises:
        ConfigError: If it is invalid.

    Example:
        >>> parse_filter("params.optimizer = 'adam'", ["status"])[0].value
        'adam'
    """
    if len(text) > _MAX_CHARACTERS:
        raise _problem(f"must have at most {_MAX_CHARACTERS} characters, got {len(text)}")
    tokens = _Tokens(text)
    comparisons: list[Comparison] = []
    while not tokens.at_end:
        if comparisons:
            tokens.expect("AND")
        comparisons.append(_comparison(tokens, attributes))
    return comparisons


def _comparison(tokens: "_Tokens", attributes: Sequence[str]) -> Comparison:
    kind, key = _identifier(tokens.take("word", "quoted"), attributes)
    comparator = tokens.comparator()
    if comparator in {"IS NULL", "IS NOT NULL"}:
        return Comparison(kind, key, comparator, None)
    if comparator in {"IN", "NOT IN"}:
        return Comparison(kind, key, comparator, tokens.list_of_texts())
    text = tokens.take("text", "number", "word")
    if kind == "metric" or key in _NUMBERS:
        if comparator not in _COMPARE:
            raise _problem(f"{key}: must be compared by =, !=, <, <=, > or >=, got {comparator}")
        return Comparison(kind, key, comparator, _number(key, text))
    if text[0] not in "'\"":
        raise _problem(f"{key}: must be compared with a quoted text, got {text[:50]}")
    if comparator not in {"=", "!=", "LIKE", "ILIKE"}:
        raise _problem(f"{key}: must be compared by =, !=, LIKE, ILIKE or IN, got {comparator}")
    return Comparison(kind, key, comparator, _unquoted(text))


def _identifier(text: str, attributes: Sequence[str]) -> tuple[str, str]:
    """Return the kind and the key of ``metrics.loss``, ``tags.`a b` `` or ``status``."""
    prefix, dot, key = text.partition(".")
    if not dot or text[0] in '`"':
        prefix, key = "attribute", text
    kind = _KIND_OF.get(prefix.lower())
    if kind is None:
        kinds = "metrics, params, tags or attributes"
        raise _problem(f"must compare {kinds}, such as metrics.loss < 1, got {text[:100]!r}")
    key = _unquoted(key)
    if kind == "attribute":
        key = _ATTRIBUTES.get(key, key)
        key = "run_id" if key == "run_uuid" else key
        if key not in attributes:
            raise _problem(f"attribute: must be {', '.join(attributes)}, got {key[:100]!r}")
    return kind, key


def _number(key: str, text: str) -> float:
    try:
        return float(_unquoted(text))
    except ValueError:
        raise _problem(f"{key}: must be compared with a number, got {text[:50]}") from None


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"`":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


class _Tokens:
    """Tokens of a filter; the next one is consumed by each call."""

    def __init__(self, text: str) -> None:
        self._items: list[tuple[str, str]] = []
        position, text = 0, text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _problem(f"must be comparisons joined by AND, got {text[position:][:50]!r}")
            self._items.append((str(match.lastgroup), match[0].strip()))
            position = match.end()
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._items)

    def take(self, *kinds: str) -> str:
        kind, text = ("end", "nothing") if self.at_end else self._items[self._next]
        if kind not in kinds:
            raise _problem(f"must be comparisons such as metrics.loss < 1, got {text[:50]!r}")
        self._next += 1
        return text

    def expect(self, word: str) -> None:
        text = self.take("word", "text", "number", "mark", "comparator", "quoted")
        if text.upper() != word:
            raise _problem(f"must be comparisons joined by AND, got {text[:50]!r} between them")

    def comparator(self) -> str:
        text = self.take("comparator", "word").upper()
        if text in _COMPARE or text in {"LIKE", "ILIKE", "IN"}:
            return text
        if text == "<>":
            return "!="
        if text == "NOT":
            self.expect("IN")
            return "NOT IN"
        if text == "IS":
            following = self.take("word").upper()
            if following == "NOT":
                self.expect("NULL")
                return "IS NOT NULL"
            if following == "NULL":
                return "IS NULL"
        raise _problem(f"must have a comparator such as =, < or LIKE, got {text[:50]!r}")

    def list_of_texts(self) -> list[str]:
        self.expect("(")
        texts = [_unquoted(self.take("text"))]
        while (mark := self.take("mark")) == ",":
            texts.append(_unquoted(self.take("text")))
        if mark != ")":
            raise _problem("IN: must be followed by a list such as ('a', 'b')")
        return texts


def parse_order(texts: Sequence[str], attributes: Sequence[str]) -> list[Order]:
    """Parse an order, such as ``metrics.loss DESC``.

    Raises:
        ConfigError: If a part is invalid.

    Example:
        >>> parse_order(["metrics.loss DESC"], ["status"])
        [Order(kind='metric', key='loss', ascending=False)]
    """
    orders = []
    for text in texts:
        name, _, direction = text.strip().rpartition(" ")
        if direction.upper() not in {"ASC", "DESC"}:
            name, direction = text.strip(), "ASC"
        if not name:
            raise ConfigError(
                "order_by", [f"must be such as metrics.loss DESC, got {text[:100]!r}"]
            )
        kind, key = _identifier(name.strip(), attributes)
        orders.append(Order(kind, key, direction.upper() == "ASC"))
    return orders


def sorted_items(items: Sequence[tuple[Values, Any]], orders: Sequence[Order]) -> list[Any]:
    """Sort items by their values; missing values and NaN come last."""
    items = list(items)
    for order in reversed(orders):
        key = (order.kind, order.key)
        present = [item for item in items if _is_number_or_text(item[0].get(key))]
        absent = [item for item in items if not _is_number_or_text(item[0].get(key))]
        present.sort(key=lambda item: item[0][key], reverse=not order.ascending)
        items = present + absent
    return [item for _, item in items]


def _is_number_or_text(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _problem(text: str) -> ConfigError:
    return ConfigError("filter", [text])
