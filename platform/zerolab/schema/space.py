"""A space of hyperparameters as its dimensions: what is searched, one leaf each.

A *point* has a coordinate for each dimension (:mod:`zerolab.schema.specs`), and None for a leaf
that does not exist there: a leaf with ``when`` exists only for some values of a categorical.

Dimensions stand in sorted order of their paths, save that a categorical comes before what depends
on it. Every one is drawn whether it exists or not, so that a seed gives the same sample however
the file is ordered.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from zerolab.errors import ConfigError
from zerolab.schema.section import Path, dotted, suggest
from zerolab.schema.specs import ConstSpec, RangeSpec, Spec, is_spec, read_spec, same

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
"""Index of a categorical dimension, and those of its categories that are wanted."""

MAX_TRIALS = 100_000
"""Most trials that one search may have."""
_MAX_DIMENSIONS = 500
"""Most specs of one space."""


@dataclass(frozen=True)
class Dimension:
    """One searched leaf."""

    path: Path
    """Keys and list indices from the top."""
    spec: Spec = field(repr=False)
    """Its values and their coordinates."""
    when: Conditions = ()
    """All must hold for the leaf to exist."""

    @property
    def name(self) -> str:
        """Dotted, as in ``net.layers[1].width``."""
        return dotted(self.path)

    @property
    def kind(self) -> str:
        """``int``, ``double``, ``log`` or ``categorical``."""
        return self.spec.type

    @property
    def size(self) -> int:
        """How many categories or whole numbers; 0 for ``double`` and ``log``."""
        return self.spec.size

    def snap(self, coordinate: float) -> float:
        """The middle of the cell of a whole number; any other coordinate as it is."""
        if self.kind != "int":
            return float(coordinate)
        cell = min(max(int(coordinate * self.size), 0), self.size - 1)
        return (cell + 0.5) / self.size


@dataclass(frozen=True)
class _Blank:
    """What stands in the place of a spec: a dimension, or a constant."""

    index: int | None
    constant: Any = None
    when: Conditions = ()


class _Absent:
    """What is put nowhere."""


_ABSENT = _Absent()


class Space:
    """Hyperparameters as a file has them, with their searched leaves as dimensions.

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
                (index[name], frozenset(wanted)) for name, wanted in leaf.wanted.items()
            )
            for leaf in leaves
        }
        self.dimensions = tuple(
            Dimension(leaf.path, leaf.spec, conditions[leaf.path]) for leaf in order
        )
        """What is searched; a categorical stands before what depends on it."""
        blanks = {leaf.path: _Blank(i, None, conditions[leaf.path]) for i, leaf in enumerate(order)}
        for leaf in leaves:
            if isinstance(leaf.spec, ConstSpec):
                blanks[leaf.path] = _Blank(None, leaf.spec.val, conditions[leaf.path])
        self._template = _with_blanks(hyperparameters, blanks, ())

    def sample(self, rng: Random) -> dict[str, Any]:
        """Draw hyperparameters at random.

        Args:
            rng: Where randomness comes from; the same state gives the same sample.
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
        """Move coordinates to the middles of their cells, and leave out what does not exist.

        Args:
            coordinates: One for each dimension; None only where the leaf does not exist.
        """
        point: list[float | None] = []
        for dimension, at in zip(self.dimensions, coordinates, strict=True):
            if not _holds(dimension.when, point):
                point.append(None)
                continue
            assert at is not None
            point.append(dimension.snap(at))
        return tuple(point)

    def hparams(self, point: Sequence[float | None]) -> dict[str, Any]:
        """The hyperparameters at a point, as a trial gets them."""
        values = [
            _ABSENT if at is None else dimension.spec.value(at)
            for dimension, at in zip(self.dimensions, point, strict=True)
        ]
        return self._fill(values, point)

    def read(self, hparams: Mapping[str, Any]) -> Point:
        """Return the point at which hyperparameters lie; the inverse of :meth:`hparams`.

        Raises:
            ConfigError: If they are none of this space.
        """
        point: list[float | None] = []
        for dimension in self.dimensions:
            if not _holds(dimension.when, point):
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
        """Every combination of the points of all leaves that exist; the last one varies fastest."""
        axes = [dimension.spec.points() for dimension in self.dimensions]
        for point in self._combine([len(axis) for axis in axes]):
            chosen = zip(axes, point, strict=True)
            yield self._fill([_ABSENT if at is None else axis[at] for axis, at in chosen], point)

    def grid_size(self, most: int | None = None) -> int:
        """How many combinations there are: counted by what later dimensions depend on.

        Args:
            most: Where to stop counting; then the size is greater.
        """
        needed = {
            parent: index
            for index, dimension in enumerate(self.dimensions)
            for parent, _ in dimension.when
        }  # a categorical to the last dimension that depends on it
        found: Counter[tuple[tuple[int, int | None], ...]] = Counter({(): 1})
        for index, dimension in enumerate(self.dimensions):
            size, before, found = dimension.spec.grid_size, found, Counter()
            for known, number in before.items():
                exists = _holds(dimension.when, dict(known))
                kept = tuple(each for each in known if needed[each[0]] > index)
                if index not in needed:
                    found[kept] += number * size if exists else number
                    continue
                for category in range(size) if exists else [None]:
                    found[*kept, (index, category)] += number
            if most is not None and found.total() > most:
                break
        return found.total()

    def extremes(self, most: int = 1000) -> Iterator[dict[str, Any]]:
        """Samples that reach the ends of every leaf and every value of a choice (the first ones).

        Args:
            most: How many samples at most.
        """
        ends = [dimension.spec.ends() for dimension in self.dimensions]
        rounds = range(min(max(map(len, ends), default=1), most))
        yield from (self._at_ends({}, number) for number in rounds)
        for index, dimension in enumerate(self.dimensions):
            if dimension.when:
                for number in range(min(len(ends[index]), most)):
                    yield self._at_ends(self._forced(index) | {index: number}, number)

    def _forced(self, index: int) -> dict[int, int]:
        """Categories with which a dimension exists, by the index of their dimensions."""
        forced: dict[int, int] = {}
        for parent, wanted in self.dimensions[index].when:
            forced |= {parent: min(wanted), **self._forced(parent)}
        return forced

    def _at_ends(self, forced: Mapping[int, int], number: int) -> dict[str, Any]:
        values: list[Any] = []
        point: list[float | None] = []
        for index, dimension in enumerate(self.dimensions):
            ends = dimension.spec.ends()
            value = ends[forced.get(index, number) % len(ends)]
            exists = _holds(dimension.when, point)
            values.append(value if exists else _ABSENT)
            point.append(dimension.spec.coordinate(value) if exists else None)
        return self._fill(values, point)

    def _combine(self, sizes: Sequence[int]) -> Iterator[list[int | None]]:
        """Every combination, as the number of a point on each axis; None where no leaf exists.

        It is one list, in which the next combination stands when it is asked for.
        """
        whens = [dimension.when for dimension in self.dimensions]
        point: list[int | None] = [None] * len(sizes)
        changed = -1
        while True:
            for index in range(changed + 1, len(sizes)):
                # Only a category's coordinate is asked for, and that is its index.
                point[index] = 0 if not whens[index] or _holds(whens[index], point) else None
            yield point
            for changed in reversed(range(len(sizes))):
                number = point[changed]
                if number is not None and number + 1 < sizes[changed]:
                    point[changed] = number + 1
                    break
            else:
                return

    def _fill(self, values: Sequence[Any], point: Sequence[float | None]) -> dict[str, Any]:
        filled: dict[str, Any] = _filled(self._template, values, point)
        return filled


def space_problems(hyperparameters: Mapping[str, Any], *, grid: bool = False) -> list[str]:
    """List what is wrong with a space, one line for each mistake.

    Args:
        hyperparameters: As a file has them.
        grid: Whether a grid is asked for, which needs a ``count`` on every range.
    """
    leaves, problems = _read(hyperparameters)
    if not grid:
        return problems
    for leaf in leaves:
        if isinstance(leaf.spec, RangeSpec) and leaf.spec.count is None:
            problems.append(
                f"hyperparameters.{dotted(leaf.path)}.count: is required by the grid searcher, "
                "got nothing; say how many points to try"
            )
    if not problems:
        problems += _size_problems(hyperparameters, leaves)
    return problems


def space_warnings(hyperparameters: Mapping[str, Any]) -> list[str]:
    """List what is probably a mistake in a space, one line each.

    Args:
        hyperparameters: As a file has them.
    """
    found = ((path, read_spec(value)) for path, value in _specs(hyperparameters, ()))
    return [
        f"hyperparameters.{dotted(path)}: {warning}"
        for path, spec in found
        if isinstance(spec, Spec)
        for warning in spec.warnings()
    ]


def misplaced_specs(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Name the specs inside a categorical's ``vals``, which a trial would get as they stand.

    Args:
        hyperparameters: As a file has them.
    """
    problems = []
    for path, value in _specs(hyperparameters, ()):
        if value["type"] != "categorical":
            continue
        for place, spec in _specs(value.get("vals"), (*path, "vals")):
            if isinstance(read_spec(spec), Spec):
                problems.append(
                    f"hyperparameters.{dotted(place)}: must be a value, for nothing is drawn "
                    f"inside vals, got a spec of type {spec['type']!r}; give it a key of its own "
                    f"beside {dotted(path)!r}, with when: {{{dotted(path)}: ...}}"
                )
    return problems


def needs_search(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Dotted names of the hyperparameters that are not constant.

    Args:
        hyperparameters: As a file has them.
    """
    found = _specs(hyperparameters, ())
    return [dotted(path) for path, value in found if value["type"] != "const"]


def _size_problems(hyperparameters: Mapping[str, Any], leaves: "list[_Leaf]") -> list[str]:
    size = 1
    for leaf in leaves:
        size *= leaf.spec.grid_size
    if size <= MAX_TRIALS:
        return []
    shown = f"{size:,}"
    if any(leaf.wanted for leaf in leaves):  # then there are fewer points than combinations
        if Space(hyperparameters).grid_size(MAX_TRIALS) <= MAX_TRIALS:
            return []
        shown = "more"
    return [
        f"hyperparameters: a grid must have at most {MAX_TRIALS:,} points, got {shown}; "
        "lower a count, or search at random"
    ]


@dataclass
class _Leaf:
    """A spec in its place."""

    path: Path
    spec: Spec
    wanted: dict[str, list[int]] = field(default_factory=dict)
    """Dotted name of a categorical to the indices of those of its values that are wanted."""


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
    """Every spec in sorted order of paths, and what is wrong with the others."""
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
    if not problems:  # else a name that is missing may be one of those that could not be read
        problems = _resolve(leaves)
    return leaves, problems


def _resolve(leaves: list[_Leaf]) -> list[str]:
    """Turn what ``when`` says into indices of values; return what is wrong."""
    choices = {dotted(leaf.path): leaf for leaf in leaves if leaf.spec.type == "categorical"}
    problems = []
    for leaf in leaves:
        for name, given in leaf.spec.when.items():
            key = f"hyperparameters.{dotted(leaf.path)}.when.{name}"
            if name not in choices:
                text = f"must be the dotted name of a categorical, got {name!r}"
                problems.append(f"{key}: {text}{suggest(name, choices)}")
                continue
            values = choices[name].spec.points()
            wanted = _wanted(given, values)
            if not wanted:
                text = f"must be one of {values}, or a list of such values, got {given!r}"
                problems.append(f"{key}: {text}")
            leaf.wanted[name] = wanted
    return problems or _circles(choices)


def _wanted(given: Any, values: list[Any]) -> list[int]:
    """Indices of the values that are given, alone or in a list; none when one is unknown."""
    alone = [index for index, value in enumerate(values) if same(value, given)]
    if alone or not isinstance(given, list):
        return alone
    found = [[index for index, value in enumerate(values) if same(value, one)] for one in given]
    return sorted({index for indices in found for index in indices}) if all(found) else []


def _circles(choices: Mapping[str, _Leaf]) -> list[str]:
    """Categoricals that exist only when they themselves have some value."""
    problems = []
    for name, leaf in choices.items():
        above, waiting = set[str](), list(leaf.wanted)
        while waiting:
            parent = waiting.pop()
            if parent not in above:
                above.add(parent)
                waiting += choices[parent].wanted
        if name in above:
            text = "must not depend on what depends on it, got a circle"
            problems.append(f"hyperparameters.{name}.when: {text}")
    return problems


def _parents_first(leaves: list[_Leaf]) -> list[_Leaf]:
    """The searched leaves in their order, a categorical before what depends on it."""
    by_name = {dotted(leaf.path): leaf for leaf in leaves}
    placed: dict[str, _Leaf] = {}

    def place(name: str) -> None:
        leaf = by_name[name]
        for parent in sorted(leaf.wanted):
            place(parent)
        if not isinstance(leaf.spec, ConstSpec):
            placed.setdefault(name, leaf)

    for name in by_name:
        place(name)
    return list(placed.values())


def _holds(when: Conditions, point: Sequence[float | None] | Mapping[int, float | None]) -> bool:
    """Whether a leaf exists, where ``point`` has at least the coordinates that it depends on."""
    return all(point[index] in wanted for index, wanted in when)


def _with_blanks(value: Any, blanks: Mapping[Path, _Blank], path: Path) -> Any:
    if path in blanks:
        return blanks[path]
    if isinstance(value, Mapping):
        return {key: _with_blanks(inner, blanks, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_blanks(inner, blanks, (*path, index)) for index, inner in enumerate(value)]
    return value


def _filled(node: Any, values: Sequence[Any], point: Sequence[float | None]) -> Any:
    """Copy a template with values in place of blanks."""
    if isinstance(node, _Blank):
        if node.index is not None:
            return values[node.index]
        return node.constant if _holds(node.when, point) else _ABSENT
    if isinstance(node, dict):
        pairs = ((key, _filled(inner, values, point)) for key, inner in node.items())
        return {key: value for key, value in pairs if value is not _ABSENT}
    if isinstance(node, list):
        items = [_filled(inner, values, point) for inner in node]
        return [item for item in items if item is not _ABSENT]
    return node


def _look_up(node: Any, value: Any, path: Path, point: Sequence[float | None]) -> Any:
    """Find what stands at a path of the template in hyperparameters, whose lists may be shorter."""
    for part in path:
        if isinstance(part, int):
            value = value[sum(_is_there(before, point) for before in node[:part])]
        else:
            value = value[part]
        node = node[part]
    return value


def _is_there(node: Any, point: Sequence[float | None]) -> bool:
    if not isinstance(node, _Blank):
        return True
    return all(i < len(point) and point[i] in wanted for i, wanted in node.when)
