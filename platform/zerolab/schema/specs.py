"""Search specs: what a hyperparameter may be, and where its values lie between 0 and 1.

A *coordinate* is where a value lies: a number in [0, 1] for ``int``, ``double`` and ``log``, the
index of the value for ``categorical``. Every platform computes the same values from the same
coordinates: powers are taken in decimal arithmetic, for the C library's differ in the last bit.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolab.schema.section import Int, PositiveFloat, PositiveInt, Section, validate

__all__ = ["SPECS", "ConstSpec", "RangeSpec", "Spec", "is_spec", "read_spec", "same"]

_DECIMAL = Context(prec=30)


class Spec(Section):
    """One hyperparameter."""

    type: str
    """Which kind of spec."""

    when: dict[str, Any] = Field(default_factory=dict)
    """Dotted name of a categorical to the value, or the list of values, with which this one
    exists; with several names all must hold."""

    @property
    def size(self) -> int:
        """How many values there are; 0 when they are not whole numbers or categories."""
        return 0

    @property
    def grid_size(self) -> int:
        """How many values a grid takes."""
        return self.size

    @abstractmethod
    def value(self, coordinate: float) -> Any:
        """The value at a coordinate."""

    @abstractmethod
    def coordinate(self, value: Any) -> float:
        """Where a value lies; what lies outside is moved to the nearest end.

        Raises:
            ValueError: If it is no value of this spec.
        """

    @abstractmethod
    def points(self) -> list[Any]:
        """The values that a grid takes."""

    @abstractmethod
    def ends(self) -> list[Any]:
        """The values between which all others lie; every value of a choice."""

    def problems(self) -> list[str]:
        """What is wrong beyond the type of single fields, each with its key."""
        return []

    def warnings(self) -> list[str]:
        """What is probably a mistake."""
        return []


class ConstSpec(Spec):
    """One value."""

    type: Literal["const"]
    val: Any
    """The value."""

    @property
    def grid_size(self) -> int:
        """The only one."""
        return 1

    def value(self, coordinate: float) -> Any:
        """The only one."""
        del coordinate
        return self.val

    def coordinate(self, value: Any) -> float:
        """Always the same."""
        del value
        return 0.0

    def points(self) -> list[Any]:
        """The only one."""
        return [self.val]

    def ends(self) -> list[Any]:
        """The only one."""
        return [self.val]


class RangeSpec(Spec):
    """Between two bounds."""

    minval: float
    """Smallest value."""
    maxval: float
    """Largest value."""
    count: PositiveInt | None = None
    """Points of a grid search."""

    @property
    def grid_size(self) -> int:
        """As many as the file says."""
        return self.count or 1

    def problems(self) -> list[str]:
        """The bounds must be two, and their distance a number."""
        if self.minval >= self.maxval:
            return [f"minval: must be less than maxval {self.maxval}, got {self.minval}"]
        if not math.isfinite(self.maxval - self.minval):
            return [f"maxval: must not be so far from minval {self.minval}, got {self.maxval}"]
        return []

    def _spread(self) -> list[float]:
        """So many numbers, evenly from one bound to the other."""
        count, low, width = self.grid_size, self.minval, self.maxval - self.minval
        if count == 1:
            return [(low + self.maxval) / 2]
        return [low + i * width / (count - 1) for i in range(count)]


class IntSpec(RangeSpec):
    """A whole number between two bounds, both included."""

    type: Literal["int"]
    minval: Int
    """Smallest value."""
    maxval: Int
    """Largest value."""

    @property
    def size(self) -> int:
        """How many whole numbers."""
        return self.maxval - self.minval + 1

    @property
    def grid_size(self) -> int:
        """As many as the file says, and no more than there are."""
        return min(self.count or 1, self.size)

    def value(self, coordinate: float) -> int:
        """Each whole number has a cell of the same width."""
        return self.minval + min(max(int(coordinate * self.size), 0), self.size - 1)

    def coordinate(self, value: Any) -> float:
        """The middle of the cell.

        Raises:
            ValueError: If it is no number.
        """
        index = min(max(_number(value) - self.minval, 0), self.size - 1)
        return (index + 0.5) / self.size

    def points(self) -> list[int]:
        """Rounded, halves away from zero; no more than there are numbers."""
        return [_half_away(point) for point in self._spread()]

    def ends(self) -> list[int]:
        """Both bounds."""
        return [self.minval, self.maxval]


class DoubleSpec(RangeSpec):
    """A number between two bounds."""

    type: Literal["double"]

    def value(self, coordinate: float) -> float:
        """Evenly."""
        return self.minval + coordinate * (self.maxval - self.minval)

    def coordinate(self, value: Any) -> float:
        """Evenly.

        Raises:
            ValueError: If it is no number.
        """
        return _inside((_number(value) - self.minval) / (self.maxval - self.minval))

    def points(self) -> list[float]:
        """Evenly from bound to bound."""
        return self._spread()

    def ends(self) -> list[float]:
        """Both bounds."""
        return [self.minval, self.maxval]


class LogSpec(RangeSpec):
    """``base`` to a power that is drawn evenly between two bounds."""

    type: Literal["log"]
    minval: float
    """Smallest power."""
    maxval: float
    """Largest power."""
    base: PositiveFloat = 10.0
    """What is raised to the power."""

    def value(self, coordinate: float) -> float:
        """The power lies evenly."""
        return self._power(self.minval + coordinate * (self.maxval - self.minval))

    def coordinate(self, value: Any) -> float:
        """Where the power lies.

        Raises:
            ValueError: If it is no number above 0.
        """
        number = _number(value)
        if number <= 0:
            msg = f"must be above 0, got {value!r}"
            raise ValueError(msg)
        # In decimals, which are the same on every machine; `math.log` differs in its last digit.
        power = float(_DECIMAL.divide(_ln(number), _ln(self.base)))
        return _inside((power - self.minval) / (self.maxval - self.minval))

    def points(self) -> list[float]:
        """Powers evenly from bound to bound."""
        return [self._power(power) for power in self._spread()]

    def ends(self) -> list[float]:
        """Both bounds."""
        return [self._power(self.minval), self._power(self.maxval)]

    def warnings(self) -> list[str]:
        """Bounds that are powers, and were probably meant as values."""
        if not (0 < self.minval <= 1 and 0 < self.maxval <= 1):
            return []
        low, high = self.ends()
        return [
            f"minval and maxval are powers of base {self.base:g}: the values are {low:.6g} to "
            f"{high:.6g}; for values from {self.minval:g} to {self.maxval:g} write "
            f"{{type: log, min: {self.minval:g}, max: {self.maxval:g}}}"
        ]

    def problems(self) -> list[str]:
        """Both ends must be numbers that differ."""
        found = super().problems()
        if found:
            return found
        if self.base == 1:
            return ["base: must not be 1, whose powers are all the same, got 1"]
        if all(0 < end < math.inf for end in self.ends()):
            return []
        return [
            "maxval: minval and maxval are powers of base, so base ** maxval must be a number, "
            f"got {self.base} ** {self.minval} and {self.base} ** {self.maxval}"
        ]

    def _power(self, power: float) -> float:
        base, exponent = _DECIMAL.create_decimal(self.base), _DECIMAL.create_decimal(power)
        try:
            return float(_DECIMAL.power(base, exponent))
        except ArithmeticError:
            return math.inf


class LogValuesSpec(RangeSpec):
    """A number between two bounds above 0, whose logarithm is drawn evenly."""

    type: Literal["log"]
    minval: PositiveFloat
    """Smallest value."""
    maxval: PositiveFloat
    """Largest value."""

    def value(self, coordinate: float) -> float:
        """Its logarithm lies evenly."""
        low, high = _DECIMAL.create_decimal(self.minval), _DECIMAL.create_decimal(self.maxval)
        ratio = _DECIMAL.divide(high, low)
        power = _DECIMAL.power(ratio, _DECIMAL.create_decimal(coordinate))
        number = float(_DECIMAL.multiply(low, power))
        return min(max(number, float(self.minval)), float(self.maxval))

    def coordinate(self, value: Any) -> float:
        """Where its logarithm lies.

        Raises:
            ValueError: If it is no number above 0.
        """
        number = _number(value)
        if number <= 0:
            raise ValueError(f"must be above 0, got {value!r}")
        low, width = _ln(self.minval), _ln(self.maxval) - _ln(self.minval)
        return _inside(float(_DECIMAL.divide(_ln(number) - low, width)))

    def points(self) -> list[float]:
        """Logarithms evenly from bound to bound."""
        count = self.grid_size
        if count == 1:
            return [self.value(0.5)]
        return [self.value(i / (count - 1)) for i in range(count)]

    def ends(self) -> list[float]:
        """Both bounds."""
        return [float(self.minval), float(self.maxval)]


class CategoricalSpec(Spec):
    """One of several values."""

    type: Literal["categorical"]
    vals: Annotated[list[Any], Field(min_length=1)]
    """The values."""

    @property
    def size(self) -> int:
        """How many values."""
        return len(self.vals)

    def value(self, coordinate: float) -> Any:
        """By its index."""
        return self.vals[int(coordinate)]

    def coordinate(self, value: Any) -> float:
        """Its index.

        Raises:
            ValueError: If it is not one of the values.
        """
        for index, mine in enumerate(self.vals):
            if same(mine, value):
                return float(index)
        msg = f"must be one of {self.vals}, got {value!r}"
        raise ValueError(msg)

    def points(self) -> list[Any]:
        """All of them."""
        return list(self.vals)

    def ends(self) -> list[Any]:
        """All of them."""
        return list(self.vals)


SPECS: dict[str, type[Spec]] = {
    "const": ConstSpec,
    "int": IntSpec,
    "double": DoubleSpec,
    "log": LogSpec,
    "categorical": CategoricalSpec,
}
"""Spec classes by the name that stands in ``type``."""

_MARKS = frozenset({"val", "minval", "maxval", "vals"})


def _ln(number: float) -> Decimal:
    return _DECIMAL.ln(_DECIMAL.create_decimal(number))


def is_spec(value: object) -> bool:
    """Whether a value is a search spec, or a mistaken attempt at one.

    A mapping whose ``type`` is another word, or is itself searched, and that has none of a spec's
    fields is a plain container: ``optimizer: {type: Adam, params: ...}`` is one.
    """
    if not isinstance(value, Mapping) or "type" not in value:
        return False
    kind = value["type"]
    if _MARKS & set(value):
        return True
    return kind in SPECS if isinstance(kind, str) else not is_spec(kind)


def read_spec(value: Mapping[str, Any]) -> Spec | list[str]:
    """Read a spec.

    Args:
        value: For which :func:`is_spec` is true.

    Returns:
        The spec, or what is wrong with it, each with its key.
    """
    kind = value["type"]
    if not isinstance(kind, str) or kind not in SPECS:
        return [f"type: must be one of {', '.join(SPECS)}, got {kind!r}"]
    if kind in _RANGES and not {"min", "max"}.isdisjoint(value):
        return _read_values(kind, value)
    spec, problems, _ = validate(SPECS[kind], value)
    if spec is None or problems:
        return problems
    return spec.problems() or spec


_RANGES: dict[str, type[RangeSpec]] = {"int": IntSpec, "double": DoubleSpec, "log": LogValuesSpec}
"""Specs whose bounds may be given as ``min`` and ``max``, which are values in all of them."""

_BOUNDS = {"minval": "min", "maxval": "max"}


def _read_values(kind: str, value: Mapping[str, Any]) -> Spec | list[str]:
    """Read a spec with ``min`` and ``max``."""
    wrong = {
        "minval": "must not be combined with min and max; remove it",
        "maxval": "must not be combined with min and max; remove it",
    } | ({"base": "has no effect with min and max, which are values; remove it"}
         if kind == "log" else {})  # fmt: skip
    problems = [f"{key}: {problem}" for key, problem in wrong.items() if key in value]
    if problems:
        return problems
    theirs = {new: old for old, new in _BOUNDS.items()}
    spec, problems, _ = validate(
        _RANGES[kind], {theirs.get(key, key): each for key, each in value.items()}
    )
    if spec is not None and not problems:
        problems = spec.problems()
    if spec is None or problems:
        return [re.sub(r"\b(minval|maxval)\b", lambda m: _BOUNDS[m[0]], line) for line in problems]
    return spec


def same(one: Any, other: Any) -> bool:
    """Whether two values of a file are the same; ``true`` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"must be a number, got {value!r}"
        raise ValueError(msg)
    return value


def _inside(coordinate: float) -> float:
    return min(max(coordinate, 0.0), 1.0)


def _half_away(value: float) -> int:
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)
