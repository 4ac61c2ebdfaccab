"""Search space of hyperparameters: one dimension for each searched leaf.

A *point* has a coordinate for each dimension (:mod:`zerolab.schema.specs`), and None for a leaf
that does not exist: a leaf with ``when`` exists only for some values of a categorical.

Dimensions are sorted by path, except that a categorical precedes its dependents. Every dimension is
drawn whether it exists or not, so that a seed gives the same sample for any order of the file.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from zerolab.errors import ConfigError
from zerolab.schema.section import Path, dotted, suggest
from zerolab.schema.specs import ConstSpec, RangeSpec, Spec, is_spec, read_spec, same_value

__all__ = [
    "MAX_TRIALS",
    "Dimension",
    "Point",
    "Space",
    "misplaced_specs",
    "needs_search",
    "space_problems",
    "space_warnings",
]

Point = tuple[float | None, ...]
"""A coordinate for each dimension; None where the leaf does not exist."""

Conditions = tuple[tuple[int, frozenset[int]], ...]
"""Index of a categorical dimension, and its categories that satisfy the condition."""

MAX_TRIALS = 100_000
"""Maximum number of trials of one search."""
_MAX_DIMENSIONS = 500
"""Maximum number of specs of one space."""


@dataclass(frozen=True)
class Dimension:
    """Searched leaf of a space."""

    path: Path
    """Keys and list indices from the top."""
    spec: Spec = field(repr=False)
    """Its values and their coordinates."""
    when: Conditions = ()
    """Conditions that must all hold for the leaf to exist."""

    @property
    def name(self) -> str:
        """Dotted path, such as ``net.layers[1].width``."""
        return dotted(self.path)

    @property
    def kind(self) -> str:
        """``int``, ``double``, ``log`` or ``categorical``."""
        return self.spec.type

    @property
    def size(self) -> int:
        """Number of categories or integers; 0 for ``double`` and ``log``."""
        return self.spec.size

    def snap(self, coordinate: float) -> float:
        """Return the centre of an integer's cell; other coordinates are unchanged."""
        if self.kind != "int":
            return float(coordinate)
        cell = min(max(int(coordinate * self.size), 0), self.size - 1)
        return (cell + 0.5) / self.size


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder of a spec in the template: a dimension, or a constant."""

    index: int | None
    constant: Any = None
    when: Conditions = ()


class _Omitted:
    """Value of a leaf that is left out."""


_OMITTED = _Omitted()


class Space:
    """Hyperparameters of a file, with their searched leaves as dimensions.

    Args:
        hyperparameters: The block of an experiment file.

    Raises:
        ConfigError: With every problem of the block.
    """

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        leaves, problems = _read(hyperparameters)
        if problems:
            raise ConfigError("hyperparameters", problems)
        order = _parents_first(leaves)
        index = {dotted(leaf.path): i for i, leaf in enumerate(order)}
        conditions = {
            leaf.path: tuple(
                (index[name], frozenset(allowed)) for name, allowed in leaf.allowed.items()
            )
            for leaf in leaves
        }
        self.dimensions = tuple(
            Dimension(leaf.path, leaf.spec, conditions[leaf.path]) for leaf in order
        )
        """Searched leaves; a categorical precedes its dependents."""
        placeholders = {
            leaf.path: _Placeholder(i, None, conditions[leaf.path]) for i, leaf in enumerate(order)
        }
        for leaf in leaves:
            if isinstance(leaf.spec, ConstSpec):
                placeholders[leaf.path] = _Placeholder(None, leaf.spec.val, conditions[leaf.path])
        self._template = _make_template(hyperparameters, placeholders, ())

    def sample(self, rng: Random) -> dict[str, Any]:
        """Draw hyperparameters at random.

        Args:
            rng: Random generator; the same state gives the same sample.
        """
        return self.hparams(self.point(rng))

    def point(self, rng: Random) -> Point:
        """Draw a point at random."""
        return self.snap(
            [
                rng.randrange(dimension.size) if dimension.kind == "categorical" else rng.random()
                for dimension in self.dimensions
            ]
        )

    def snap(self, coordinates: Sequence[float | None]) -> Point:
        """Move coordinates to the centres of their cells; missing leaves get None.

        Args:
            coordinates: One for each dimension; None only where the leaf does not exist.
        """
        point: list[float | None] = []
        for dimension, at in zip(self.dimensions, coordinates, strict=True):
            if not _conditions_hold(dimension.when, point):
                point.append(None)
                continue
            assert at is not None
            point.append(dimension.snap(at))
        return tuple(point)

    def hparams(self, point: Sequence[float | None]) -> dict[str, Any]:
        """Return the hyperparameters at a point, as a trial gets them."""
        values = [
            _OMITTED if at is None else dimension.spec.value(at)
            for dimension, at in zip(self.dimensions, point, strict=True)
        ]
        return self._fill(values, point)

    def read(self, hparams: Mapping[str, Any]) -> Point:
        """Return the point of given hyperparameters; the inverse of :meth:`hparams`.

        Raises:
            ConfigError: If they do not belong to this space.
        """
        point: list[float | None] = []
        for dimension in self.dimensions:
            if not _conditions_hold(dimension.when, point):
                point.append(None)
                continue
            try:
                value = _look_up(self._template, hparams, dimension.path, point)
                point.append(dimension.spec.coordinate(value))
            except (LookupError, TypeError) as error:
                problem = f"{dimension.name}: is required, got nothing"
                raise ConfigError("hyperparameters", [problem]) from error
            except ValueError as error:
                raise ConfigError("hyperparameters", [f"{dimension.name}: {error}"]) from error
        return tuple(point)

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the points of all existing leaves; the last varies fastest."""
        axes = [dimension.spec.points() for dimension in self.dimensions]
        for point in self._combine([len(axis) for axis in axes]):
            chosen = zip(axes, point, strict=True)
            yield self._fill([_OMITTED if at is None else axis[at] for axis, at in chosen], point)

    def grid_size(self, limit: int | None = None) -> int:
        """Return the number of combinations.

        Args:
            limit: Number at which counting stops; the size is then greater.
        """
        needed = {
            parent: index
            for index, dimension in enumerate(self.dimensions)
            for parent, _ in dimension.when
        }  # a categorical to the last dimension that depends on it
        # Count by the categories that later dimensions depend on; enumeration would be slow.
        counts: Counter[tuple[tuple[int, int | None], ...]] = Counter({(): 1})
        for index, dimension in enumerate(self.dimensions):
            size, previous, counts = dimension.spec.grid_size, counts, Counter()
            for categories, number in previous.items():
                exists = _conditions_hold(dimension.when, dict(categories))
                relevant = tuple(entry for entry in categories if needed[entry[0]] > index)
                if index not in needed:
                    counts[relevant] += number * size if exists else number
                    continue
                for category in range(size) if exists else [None]:
                    counts[*relevant, (index, category)] += number
            if limit is not None and counts.total() > limit:
                break
        return counts.total()

    def extremes(self, limit: int = 1000) -> Iterator[dict[str, Any]]:
        """Yield samples that reach the ends of every leaf and every value of a choice.

        Args:
            limit: Maximum number of samples for each leaf.
        """
        ends = [dimension.spec.ends() for dimension in self.dimensions]
        rounds = range(min(max(map(len, ends), default=1), limit))
        yield from (self._at_ends({}, number) for number in rounds)
        for index, dimension in enumerate(self.dimensions):
            if dimension.when:
                for number in range(min(len(ends[index]), limit)):
                    yield self._at_ends(self._forced(index) | {index: number}, number)

    def _forced(self, index: int) -> dict[int, int]:
        """Return the categories with which a dimension exists, by the index of their dimensions."""
        forced: dict[int, int] = {}
        for parent, allowed in self.dimensions[index].when:
            forced |= {parent: min(allowed), **self._forced(parent)}
        return forced

    def _at_ends(self, forced: Mapping[int, int], number: int) -> dict[str, Any]:
        values: list[Any] = []
        point: list[float | None] = []
        for index, dimension in enumerate(self.dimensions):
            ends = dimension.spec.ends()
            value = ends[forced.get(index, number) % len(ends)]
            exists = _conditions_hold(dimension.when, point)
            values.append(value if exists else _OMITTED)
            point.append(dimension.spec.coordinate(value) if exists else None)
        return self._fill(values, point)

    def _combine(self, sizes: Sequence[int]) -> Iterator[list[int | None]]:
        """Yield every combination as point numbers on each axis; missing leaves have None.

        The same list is yielded each time, and changed in place.
        """
        whens = [dimension.when for dimension in self.dimensions]
        point: list[int | None] = [None] * len(sizes)
        changed = -1
        while True:
            for index in range(changed + 1, len(sizes)):
                # Conditions only read a category's coordinate, which is its index.
                point[index] = (
                    0 if not whens[index] or _conditions_hold(whens[index], point) else None
                )
            yield point
            for changed in reversed(range(len(sizes))):
                number = point[changed]
                if number is not None and number + 1 < sizes[changed]:
                    point[changed] = number + 1
                    break
            else:
                return

    def _fill(self, values: Sequence[Any], point: Sequence[float | None]) -> dict[str, Any]:
        filled: dict[str, Any] = _fill_template(self._template, values, point)
        return filled


def space_problems(hyperparameters: Mapping[str, Any], *, grid: bool = False) -> list[str]:
    """List the mistakes of a space, one line each.

    Args:
        hyperparameters: As in the file.
        grid: Whether a grid is requested, which needs a ``count`` on every range.
    """
    leaves, problems = _read(hyperparameters)
    if not grid:
        return problems
    for leaf in leaves:
        if isinstance(leaf.spec, RangeSpec) and leaf.spec.count is None:
            problems.append(
                f"hyperparameters.{dotted(leaf.path)}.count: is required by the grid searcher, "
                "got nothing; set the number of points"
            )
    if not problems:
        problems += _size_problems(hyperparameters, leaves)
    return problems


def space_warnings(hyperparameters: Mapping[str, Any]) -> list[str]:
    """List probable mistakes of a space, one line each.

    Args:
        hyperparameters: As in the file.
    """
    specs = ((path, read_spec(value)) for path, value in _specs(hyperparameters, ()))
    return [
        f"hyperparameters.{dotted(path)}: {warning}"
        for path, spec in specs
        if isinstance(spec, Spec)
        for warning in spec.warnings()
    ]


def misplaced_specs(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Report specs inside a categorical's ``vals``, which a trial would get unchanged.

    Args:
        hyperparameters: As in the file.
    """
    problems = []
    for path, value in _specs(hyperparameters, ()):
        if value["type"] != "categorical":
            continue
        for inner_path, spec in _specs(value.get("vals"), (*path, "vals")):
            if isinstance(read_spec(spec), Spec):
                problems.append(
                    f"hyperparameters.{dotted(inner_path)}: must be a value, because vals are not "
                    f"sampled, got a spec of type {spec['type']!r}; give it a separate key next "
                    f"to {dotted(path)!r}, with when: {{{dotted(path)}: ...}}"
                )
    return problems


def needs_search(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the hyperparameters that are not constant.

    Args:
        hyperparameters: As in the file.
    """
    specs = _specs(hyperparameters, ())
    return [dotted(path) for path, value in specs if value["type"] != "const"]


def _size_problems(hyperparameters: Mapping[str, Any], leaves: "list[_Leaf]") -> list[str]:
    size = 1
    for leaf in leaves:
        size *= leaf.spec.grid_size
    if size <= MAX_TRIALS:
        return []
    shown = f"{size:,}"
    if any(leaf.allowed for leaf in leaves):  # conditions make the grid smaller than the product
        if Space(hyperparameters).grid_size(MAX_TRIALS) <= MAX_TRIALS:
            return []
        shown = "more"
    return [
        f"hyperparameters: a grid must have at most {MAX_TRIALS:,} points, got {shown}; "
        "lower a count, or search at random"
    ]


@dataclass
class _Leaf:
    """Spec at a path."""

    path: Path
    spec: Spec
    allowed: dict[str, list[int]] = field(default_factory=dict)
    """Dotted name of a categorical to the indices of its values that satisfy the condition."""


def _specs(value: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    if is_spec(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _specs(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _specs(item, (*path, index))


def _read(hyperparameters: Mapping[str, Any]) -> tuple[list[_Leaf], list[str]]:
    """Return every spec in sorted order of paths, and the problems of invalid ones."""
    leaves, problems = [], []
    for path, value in _specs(hyperparameters, ()):
        spec = read_spec(value)
        if isinstance(spec, list):
            problems += [f"hyperparameters.{dotted(path)}.{problem}" for problem in spec]
        else:
            leaves.append(_Leaf(path, spec))
    if len(leaves) > _MAX_DIMENSIONS:
        problems.append(
            f"hyperparameters: must hold at most {_MAX_DIMENSIONS} specs, got {len(leaves):,}"
        )
    if not problems:  # else a missing name may be one of the invalid specs
        problems = _resolve(leaves)
    return leaves, problems


def _resolve(leaves: list[_Leaf]) -> list[str]:
    """Convert conditions to indices of values; return their problems."""
    choices = {dotted(leaf.path): leaf for leaf in leaves if leaf.spec.type == "categorical"}
    problems = []
    for leaf in leaves:
        for name, condition in leaf.spec.when.items():
            key = f"hyperparameters.{dotted(leaf.path)}.when.{name}"
            if name not in choices:
                text = f"must be the dotted name of a categorical, got {name!r}"
                problems.append(f"{key}: {text}{suggest(name, choices)}")
                continue
            values = choices[name].spec.points()
            allowed = _matching_indices(condition, values)
            if not allowed:
                text = f"must be one of {values}, or a list of such values, got {condition!r}"
                problems.append(f"{key}: {text}")
            leaf.allowed[name] = allowed
    return problems or _cycle_problems(choices)


def _matching_indices(condition: Any, values: list[Any]) -> list[int]:
    """Return the indices of the condition's value or values; empty when one is unknown."""
    matches = [index for index, value in enumerate(values) if same_value(value, condition)]
    if matches or not isinstance(condition, list):
        return matches
    indices_by_value = [
        [index for index, value in enumerate(values) if same_value(value, item)]
        for item in condition
    ]
    return (
        sorted({index for indices in indices_by_value for index in indices})
        if all(indices_by_value)
        else []
    )


def _cycle_problems(choices: Mapping[str, _Leaf]) -> list[str]:
    """Report categoricals whose existence depends on themselves."""
    problems = []
    for name, leaf in choices.items():
        above, waiting = set[str](), list(leaf.allowed)
        while waiting:
            parent = waiting.pop()
            if parent not in above:
                above.add(parent)
                waiting += choices[parent].allowed
        if name in above:
            text = "must not depend on what depends on it, got a cycle"
            problems.append(f"hyperparameters.{name}.when: {text}")
    return problems


def _parents_first(leaves: list[_Leaf]) -> list[_Leaf]:
    """Return the searched leaves in order, each categorical before its dependents."""
    by_name = {dotted(leaf.path): leaf for leaf in leaves}
    placed: dict[str, _Leaf] = {}

    def place(name: str) -> None:
        leaf = by_name[name]
        for parent in sorted(leaf.allowed):
            place(parent)
        if not isinstance(leaf.spec, ConstSpec):
            placed.setdefault(name, leaf)

    for name in by_name:
        place(name)
    return list(placed.values())


def _conditions_hold(
    when: Conditions, point: Sequence[float | None] | Mapping[int, float | None]
) -> bool:
    """Whether a leaf exists; ``point`` needs the coordinates that it depends on."""
    return all(point[index] in allowed for index, allowed in when)


def _make_template(value: Any, placeholders: Mapping[Path, _Placeholder], path: Path) -> Any:
    if path in placeholders:
        return placeholders[path]
    if isinstance(value, Mapping):
        return {
            key: _make_template(inner, placeholders, (*path, key)) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [
            _make_template(inner, placeholders, (*path, index)) for index, inner in enumerate(value)
        ]
    return value


def _fill_template(node: Any, values: Sequence[Any], point: Sequence[float | None]) -> Any:
    """Copy a template with values instead of placeholders."""
    if isinstance(node, _Placeholder):
        if node.index is not None:
            return values[node.index]
        return node.constant if _conditions_hold(node.when, point) else _OMITTED
    if isinstance(node, dict):
        pairs = ((key, _fill_template(inner, values, point)) for key, inner in node.items())
        return {key: value for key, value in pairs if value is not _OMITTED}
    if isinstance(node, list):
        items = [_fill_template(inner, values, point) for inner in node]
        return [item for item in items if item is not _OMITTED]
    return node


def _look_up(node: Any, value: Any, path: Path, point: Sequence[float | None]) -> Any:
    """Return the value at a path of the template; lists of hyperparameters may be shorter."""
    for part in path:
        if isinstance(part, int):
            value = value[sum(_exists(before, point) for before in node[:part])]
        else:
            value = value[part]
        node = node[part]
    return value


def _exists(node: Any, point: Sequence[float | None]) -> bool:
    if not isinstance(node, _Placeholder):
        return True
    return all(i < len(point) and point[i] in allowed for i, allowed in node.when)
