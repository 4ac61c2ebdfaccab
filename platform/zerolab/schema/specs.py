"""Search specs: values of a hyperparameter and their coordinates.

A *coordinate* is the position of a value: a number in [0, 1] for ``int``, ``double`` and ``log``,
the index of the value for ``categorical``. Every platform computes the same values from the same
coordinates: powers use decimal arithmetic, as C libraries differ in the last bit.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolab.schema.section import Int, PositiveFloat, PositiveInt, Section, suggest, validate

__all__ = ["SPECS", "ConstSpec", "RangeSpec", "Spec", "is_spec", "read_spec", "same_value"]

_DECIMAL = Context(prec=30)


class Spec(Section):
    """Spec of one hyperparameter."""

    type: str
    """Kind of the spec."""

    when: dict[str, Any] = Field(default_factory=dict)
    """Dotted name of a categorical to the value, or the list of values, with which this leaf
    exists; several conditions must all hold."""

    @property
    def size(self) -> int:
        """Number of values; 0 for continuous specs."""
        return 0

    @property
    def grid_size(self) -> int:
        """Number of points in a grid."""
        return self.size

    @abstractmethod
    def value(self, coordinate: float) -> Any:
        """Return the value at a coordinate."""

    @abstractmethod
    def coordinate(self, value: Any) -> float:
        """Return the coordinate of a value; values outside are moved to the nearest end.

        Raises:
            ValueError: If it is not a value of this spec.
        """

    @abstractmethod
    def points(self) -> list[Any]:
        """Return the values of a grid."""

    @abstractmethod
    def ends(self) -> list[Any]:
        """Return the bounds; every value of a choice."""

    def problems(self) -> list[str]:
        """Return problems beyond the types of single fields, each with its key."""
        return []

    def warnings(self) -> list[str]:
        """Return probable mistakes."""
        return []


class ConstSpec(Spec):
    """Constant value."""

    type: Literal["const"]
    val: Any
    """The value."""

    @property
    def grid_size(self) -> int:
        """One point."""
        return 1

    def value(self, coordinate: float) -> Any:
        """Return the constant."""
        del coordinate
        return self.val

    def coordinate(self, value: Any) -> float:
        """Return 0."""
        del value
        return 0.0

    def points(self) -> list[Any]:
        """Return the constant."""
        return [self.val]

    def ends(self) -> list[Any]:
        """Return the constant."""
        return [self.val]


class RangeSpec(Spec):
    """Range between two bounds."""

    minval: float
    """Smallest value."""
    maxval: float
    """Largest value."""
    count: PositiveInt | None = None
    """Number of points in a grid search."""

    @property
    def grid_size(self) -> int:
        """Number of points in a grid; 1 without a ``count``."""
        return self.count or 1

    def problems(self) -> list[str]:
        """Report bounds that are equal, reversed or too far apart."""
        if self.minval >= self.maxval:
            return [f"minval: must be less than maxval {self.maxval}, got {self.minval}"]
        if not math.isfinite(self.maxval - self.minval):
            return [f"maxval: must not be so far from minval {self.minval}, got {self.maxval}"]
        return []

    def _evenly_spaced(self) -> list[float]:
        """Return evenly spaced numbers from one bound to the other."""
        count, low, width = self.grid_size, self.minval, self.maxval - self.minval
        if count == 1:
            return [(low + self.maxval) / 2]
        return [low + i * width / (count - 1) for i in range(count)]


class IntSpec(RangeSpec):
    """Integer between two bounds, both included."""

    type: Literal["int"]
    minval: Int
    """Smallest value."""
    maxval: Int
    """Largest value."""

    @property
    def size(self) -> int:
        """Number of integers."""
        return self.maxval - self.minval + 1

    @property
    def grid_size(self) -> int:
        """Number of points, at most the number of integers."""
        return min(self.count or 1, self.size)

    def value(self, coordinate: float) -> int:
        """Return the integer of a coordinate; all have cells of the same width."""
        return self.minval + min(max(int(coordinate * self.size), 0), self.size - 1)

    def coordinate(self, value: Any) -> float:
        """Return the centre of the integer's cell.

        Raises:
            ValueError: If it is not a number.
        """
        index = min(max(_number(value) - self.minval, 0), self.size - 1)
        return (index + 0.5) / self.size

    def points(self) -> list[int]:
        """Return the grid points, rounded half away from zero."""
        return [_round_half_away(point) for point in self._evenly_spaced()]

    def ends(self) -> list[int]:
        """Return both bounds."""
        return [self.minval, self.maxval]


class DoubleSpec(RangeSpec):
    """Number between two bounds."""

    type: Literal["double"]

    def value(self, coordinate: float) -> float:
        """Return the value, linear in the coordinate."""
        return self.minval + coordinate * (self.maxval - self.minval)

    def coordinate(self, value: Any) -> float:
        """Return the coordinate, linear in the value.

        Raises:
            ValueError: If it is not a number.
        """
        return _clamp((_number(value) - self.minval) / (self.maxval - self.minval))

    def points(self) -> list[float]:
        """Return evenly spaced points from bound to bound."""
        return self._evenly_spaced()

    def ends(self) -> list[float]:
        """Return both bounds."""
        return [self.minval, self.maxval]


class LogSpec(RangeSpec):
    """``base`` to a power that is uniform between two bounds."""

    type: Literal["log"]
    minval: float
    """Smallest power."""
    maxval: float
    """Largest power."""
    base: PositiveFloat = 10.0
    """Base of the power."""

    def value(self, coordinate: float) -> float:
        """Return the value; its power is linear in the coordinate."""
        return self._power(self.minval + coordinate * (self.maxval - self.minval))

    def coordinate(self, value: Any) -> float:
        """Return the coordinate of the value's power.

        Raises:
            ValueError: If it is not a positive number.
        """
        number = _number(value)
        if number <= 0:
            msg = f"must be above 0, got {value!r}"
            raise ValueError(msg)
        # Decimals are the same on every machine; `math.log` differs in the last digit.
        power = float(_DECIMAL.divide(_ln(number), _ln(self.base)))
        return _clamp((power - self.minval) / (self.maxval - self.minval))

    def points(self) -> list[float]:
        """Return values whose powers are evenly spaced from bound to bound."""
        return [self._power(power) for power in self._evenly_spaced()]

    def ends(self) -> list[float]:
        """Return both bounds."""
        return [self._power(self.minval), self._power(self.maxval)]

    def warnings(self) -> list[str]:
        """Warn about powers that were probably meant as values."""
        if not (0 < self.minval <= 1 and 0 < self.maxval <= 1):
            return []
        low, high = self.ends()
        return [
            f"minval and maxval are powers of base {self.base:g}: the values are {low:.6g} to "
            f"{high:.6g}; for values from {self.minval:g} to {self.maxval:g} write "
            f"{{type: log, min: {self.minval:g}, max: {self.maxval:g}}}"
        ]

    def problems(self) -> list[str]:
        """Report a base of 1, and bounds whose values overflow."""
        problems = super().problems()
        if problems:
            return problems
        if self.base == 1:
            return ["base: must not be 1, whose powers are all equal, got 1"]
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
    """Number between two positive bounds, uniform in its logarithm."""

    type: Literal["log"]
    minval: PositiveFloat
    """Smallest value."""
    maxval: PositiveFloat
    """Largest value."""

    def value(self, coordinate: float) -> float:
        """Return the value; its logarithm is linear in the coordinate."""
        low, high = _DECIMAL.create_decimal(self.minval), _DECIMAL.create_decimal(self.maxval)
        ratio = _DECIMAL.divide(high, low)
        power = _DECIMAL.power(ratio, _DECIMAL.create_decimal(coordinate))
        number = float(_DECIMAL.multiply(low, power))
        return min(max(number, float(self.minval)), float(self.maxval))

    def coordinate(self, value: Any) -> float:
        """Return the coordinate of the value's logarithm.

        Raises:
            ValueError: If it is not a positive number.
        """
        number = _number(value)
        if number <= 0:
            raise ValueError(f"must be above 0, got {value!r}")
        low, width = _ln(self.minval), _ln(self.maxval) - _ln(self.minval)
        return _clamp(float(_DECIMAL.divide(_ln(number) - low, width)))

    def points(self) -> list[float]:
        """Return values whose logarithms are evenly spaced from bound to bound."""
        count = self.grid_size
        if count == 1:
            return [self.value(0.5)]
        return [self.value(i / (count - 1)) for i in range(count)]

    def ends(self) -> list[float]:
        """Return both bounds."""
        return [float(self.minval), float(self.maxval)]


class CategoricalSpec(Spec):
    """One of several values."""

    type: Literal["categorical"]
    vals: Annotated[list[Any], Field(min_length=1)]
    """The values."""

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.vals)

    def value(self, coordinate: float) -> Any:
        """Return the value at an index."""
        return self.vals[int(coordinate)]

    def coordinate(self, value: Any) -> float:
        """Return the index of a value.

        Raises:
            ValueError: If it is not one of the values.
        """
        for index, own_value in enumerate(self.vals):
            if same_value(own_value, value):
                return float(index)
        msg = f"must be one of {self.vals}, got {value!r}"
        raise ValueError(msg)

    def points(self) -> list[Any]:
        """Return all values."""
        return list(self.vals)

    def ends(self) -> list[Any]:
        """Return all values."""
        return list(self.vals)


SPECS: dict[str, type[Spec]] = {
    "const": ConstSpec,
    "int": IntSpec,
    "double": DoubleSpec,
    "log": LogSpec,
    "categorical": CategoricalSpec,
}
"""Spec classes by their ``type``."""

_SPEC_KEYS = frozenset({"val", "minval", "maxval", "vals"})


def _ln(number: float) -> Decimal:
    return _DECIMAL.ln(_DECIMAL.create_decimal(number))


def is_spec(value: object) -> bool:
    """Whether a value is a search spec, or a mistaken attempt at one.

    A mapping is a plain container if its ``type`` is another word, or is itself searched, and it
    has no field of a spec: ``optimizer: {type: Adam, params: ...}`` is one.
    """
    if not isinstance(value, Mapping) or "type" not in value:
        return False
    kind = value["type"]
    if _SPEC_KEYS & set(value):
        return True
    return kind in SPECS if isinstance(kind, str) else not is_spec(kind)


def read_spec(value: Mapping[str, Any]) -> Spec | list[str]:
    """Parse a spec.

    Args:
        value: Mapping for which :func:`is_spec` is true.

    Returns:
        The spec, or its problems, each with its key.
    """
    kind = value["type"]
    if not isinstance(kind, str) or kind not in SPECS:
        hint = suggest(kind, SPECS) if isinstance(kind, str) else ""
        return [f"type: must be one of {', '.join(SPECS)}, got {kind!r}{hint}"]
    if kind in _RANGES and not {"min", "max"}.isdisjoint(value):
        return _read_min_max(kind, value)
    spec, problems, _ = validate(SPECS[kind], value)
    if spec is None or problems:
        return problems
    return spec.problems() or spec


_RANGES: dict[str, type[RangeSpec]] = {"int": IntSpec, "double": DoubleSpec, "log": LogValuesSpec}
"""Specs that also accept ``min`` and ``max``, which are always values."""

_BOUNDS = {"minval": "min", "maxval": "max"}


def _read_min_max(kind: str, value: Mapping[str, Any]) -> Spec | list[str]:
    """Parse a spec with ``min`` and ``max``."""
    wrong = {
        "minval": "must not be combined with min and max; remove it",
        "maxval": "must not be combined with min and max; remove it",
    } | ({"base": "has no effect with min and max, which are values; remove it"}
         if kind == "log" else {})  # fmt: skip
    problems = [f"{key}: {problem}" for key, problem in wrong.items() if key in value]
    if problems:
        return problems
    renamed = {new: old for old, new in _BOUNDS.items()}
    spec, problems, _ = validate(
        _RANGES[kind], {renamed.get(key, key): item for key, item in value.items()}
    )
    if spec is not None and not problems:
        problems = spec.problems()
    if spec is None or problems:
        return [re.sub(r"\b(minval|maxval)\b", lambda m: _BOUNDS[m[0]], line) for line in problems]
    return spec


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a file are equal; ``true`` is not 1."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"must be a number, got {value!r}"
        raise ValueError(msg)
    return value


def _clamp(coordinate: float) -> float:
    return min(max(coordinate, 0.0), 1.0)


def _round_half_away(value: float) -> int:
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)
