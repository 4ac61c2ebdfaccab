"""Hyperparameter spaces: constants and search specs at any depth of nested mappings and lists.

A mapping with a ``type`` is a spec (``const``, ``int``, ``double``, ``log``, ``categorical``);
every other mapping or list is a container, and every other value a constant.

Random draws go through a mapping's keys in sorted order, so that one seed always gives the same
sample however the file is ordered.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolab.errors import ConfigError
from zerolab.schema.section import Int, PositiveFloat, PositiveInt, Section, dotted, validate

__all__ = [
    "MAX_TRIALS",
    "SPECS",
    "extremes",
    "grid_points",
    "is_spec",
    "needs_search",
    "sample_hyperparameters",
    "space_problems",
]


class ConstSpec(Section):
    """One value."""

    type: Literal["const"]
    val: Any
    """The value."""


class IntSpec(Section):
    """A whole number between two bounds, both included."""

    type: Literal["int"]
    minval: Int
    """Smallest value."""
    maxval: Int
    """Largest value."""
    count: PositiveInt | None = None
    """Points of a grid search."""


class DoubleSpec(Section):
    """A number between two bounds."""

    type: Literal["double"]
    minval: float
    """Smallest value."""
    maxval: float
    """Largest value."""
    count: PositiveInt | None = None
    """Points of a grid search."""


class LogSpec(Section):
    """``base`` to a power that is drawn evenly between two bounds."""

    type: Literal["log"]
    minval: float
    """Smallest power."""
    maxval: float
    """Largest power."""
    base: PositiveFloat = 10.0
    """What is raised to the power."""
    count: PositiveInt | None = None
    """Points of a grid search."""


class CategoricalSpec(Section):
    """One of several values."""

    type: Literal["categorical"]
    vals: Annotated[list[Any], Field(min_length=1)]
    """The values."""


Spec = ConstSpec | IntSpec | DoubleSpec | LogSpec | CategoricalSpec

SPECS: dict[str, type[Section]] = {
    "const": ConstSpec,
    "int": IntSpec,
    "double": DoubleSpec,
    "log": LogSpec,
    "categorical": CategoricalSpec,
}
"""Spec classes by the name that stands in ``type``."""

MAX_TRIALS = 100_000
"""Most trials that one search may have."""

_MARKS = frozenset({"val", "minval", "maxval", "vals"})


def is_spec(value: object) -> bool:
    """Whether a value is a search spec, or a mistaken attempt at one.

    A mapping whose ``type`` is another word and that has none of a spec's fields is a plain
    container: ``optimizer: {type: Adam, params: ...}`` is one.
    """
    if not isinstance(value, Mapping) or "type" not in value:
        return False
    kind = value["type"]
    return kind in SPECS if isinstance(kind, str) and not _MARKS & set(value) else True


def _read(value: Mapping[str, Any]) -> Spec | list[str]:
    kind = value["type"]
    if not isinstance(kind, str) or kind not in SPECS:
        return [f"type: must be one of {', '.join(SPECS)}, got {kind!r}"]
    spec, problems, _ = validate(SPECS[kind], value)
    if not problems and isinstance(spec, IntSpec | DoubleSpec | LogSpec):
        if spec.minval >= spec.maxval:
            problems = [f"minval: must be less than maxval {spec.maxval}, got {spec.minval}"]
        if isinstance(spec, LogSpec) and not problems:
            problems = _log_problems(spec)
    if problems or spec is None:
        return problems
    assert isinstance(spec, Spec)
    return spec


def _log_problems(spec: LogSpec) -> list[str]:
    try:
        ends = (spec.base**spec.minval, spec.base**spec.maxval)
    except OverflowError:
        ends = (0.0, math.inf)
    if all(0 < end < math.inf for end in ends):
        return []
    return [
        "maxval: minval and maxval are powers of base, so base ** maxval must be a number, "
        f"got {spec.base} ** {spec.minval} and {spec.base} ** {spec.maxval}"
    ]


def _specs(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if is_spec(value):
        yield dotted(path), value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _specs(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _specs(item, (*path, index))


def space_problems(space: Mapping[str, Any], *, grid: bool = False) -> list[str]:
    """List what is wrong with a space, one line for each mistake.

    Args:
        space: Hyperparameters as a file has them.
        grid: Whether a grid is asked for, which needs a ``count`` on every range.
    """
    problems = []
    size = 1
    for key, value in _specs(space, ()):
        spec = _read(value)
        if isinstance(spec, list):
            problems += [f"hyperparameters.{key}.{problem}" for problem in spec]
        elif grid and isinstance(spec, IntSpec | DoubleSpec | LogSpec) and spec.count is None:
            problems.append(
                f"hyperparameters.{key}.count: is required by the grid searcher, got nothing; "
                "say how many points to try"
            )
        else:
            size *= _size(spec)
    if grid and size > MAX_TRIALS:
        problems.append(
            f"hyperparameters: a grid must have at most {MAX_TRIALS:,} points, got {size:,}; "
            "lower a count, or search at random"
        )
    return problems


def _size(spec: Spec) -> int:
    """Points of one axis of a grid."""
    match spec:
        case ConstSpec():
            return 1
        case CategoricalSpec():
            return len(spec.vals)
        case IntSpec():
            return min(spec.count or 1, spec.maxval - spec.minval + 1)
        case DoubleSpec() | LogSpec():
            return spec.count or 1


def needs_search(space: Mapping[str, Any]) -> list[str]:
    """Dotted names of the hyperparameters that are not constant."""
    return [key for key, value in _specs(space, ()) if value["type"] != "const"]


def _walk(value: Any, choose: Callable[[Spec], Any]) -> Any:
    """Copy a space with every spec replaced by what ``choose`` makes of it, in sorted order."""
    if is_spec(value):
        spec = _read(value)
        if isinstance(spec, list):
            raise ConfigError("hyperparameters", spec)
        return choose(spec)
    if isinstance(value, Mapping):
        chosen = {key: _walk(value[key], choose) for key in sorted(value)}
        return {key: chosen[key] for key in value}
    if isinstance(value, list):
        return [_walk(item, choose) for item in value]
    return value


def sample_hyperparameters(space: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Draw one value for every spec of a space.

    Args:
        space: Hyperparameters as a file has them.
        rng: Where randomness comes from; the same state gives the same sample.

    Returns:
        The space with values in place of specs.

    Raises:
        ConfigError: If a spec is not a valid one.
    """

    def draw(spec: Spec) -> Any:
        match spec:
            case ConstSpec():
                return spec.val
            case IntSpec():
                return rng.randint(spec.minval, spec.maxval)
            case DoubleSpec():
                return rng.uniform(spec.minval, spec.maxval)
            case LogSpec():
                return spec.base ** rng.uniform(spec.minval, spec.maxval)
            case CategoricalSpec():
                return spec.vals[rng.randrange(len(spec.vals))]

    sample: dict[str, Any] = _walk(space, draw)
    return sample


def _points(spec: Spec) -> list[Any]:
    match spec:
        case ConstSpec():
            return [spec.val]
        case CategoricalSpec():
            return list(spec.vals)
        case IntSpec():
            points = _spread(spec.minval, spec.maxval, _size(spec))
            return [_half_away(point) for point in points]
        case DoubleSpec():
            return _spread(spec.minval, spec.maxval, spec.count or 1)
        case LogSpec():
            return [spec.base**p for p in _spread(spec.minval, spec.maxval, spec.count or 1)]


def _half_away(value: float) -> int:
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)


def _spread(low: float, high: float, count: int) -> list[float]:
    if count == 1:
        return [(low + high) / 2]
    return [low + i * (high - low) / (count - 1) for i in range(count)]


def grid_points(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the points of a space, in sorted order of names.

    Args:
        space: Hyperparameters as a file has them; every range has a ``count``.

    Returns:
        One mapping for each combination; the last name varies fastest.

    Raises:
        ConfigError: If a spec is not a valid one, or a range has no ``count``.
    """
    problems = space_problems(space, grid=True)
    if problems:
        raise ConfigError("hyperparameters", problems)
    axes: list[list[Any]] = []

    def note(spec: Spec) -> None:
        axes.append(_points(spec))

    _walk(space, note)
    points = []
    for combination in itertools.product(*axes):
        values = iter(combination)
        points.append(_walk(space, lambda _spec, values=values: next(values)))  # type: ignore[misc]
    return points


def extremes(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Samples that reach the ends of every range and every value of a choice (the first 1,000).

    Args:
        space: Hyperparameters as a file has them, without mistakes.
    """
    longest = 1

    def ends(spec: Spec) -> list[Any]:
        match spec:
            case ConstSpec():
                return [spec.val]
            case CategoricalSpec():
                return list(spec.vals)
            case LogSpec():
                return [spec.base**spec.minval, spec.base**spec.maxval]
            case IntSpec() | DoubleSpec():
                return [spec.minval, spec.maxval]

    def measure(spec: Spec) -> None:
        nonlocal longest
        longest = max(longest, len(ends(spec)))

    _walk(space, measure)
    samples = []
    for index in range(min(longest, 1000)):

        def pick(spec: Spec, index: int = index) -> Any:
            values = ends(spec)
            return values[index % len(values)]

        samples.append(_walk(space, pick))
    return samples
