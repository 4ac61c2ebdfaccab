"""Registries of named objects, of the core and of entry points."""

import importlib.metadata
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any, Generic, TypeVar

from zerolab.errors import ConfigError

__all__ = ["PARTS", "Registry", "subclass_of"]

T = TypeVar("T")
C = TypeVar("C")

_DISTRIBUTION = "zerolab"
_CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"


class Registry(MutableMapping[str, T], Generic[T]):
    """Objects by name: built-in ones, and extensions, which are loaded when they are looked up.

    An extension is an entry point of an installed distribution. Our own extensions and those of
    others are found in the same way.

    Args:
        group: Group of the entry points, such as ``zerolab.searchers``.
        builtins: Objects of the core by name.
        convert: Applied to what an entry point names; raises TypeError if it does not fit.

    Example::

        SEARCHERS = Registry("zerolab.searchers", {"single": SingleConfig})
        SEARCHERS["single"]             # from the core
        SEARCHERS["tpe_asha"]           # imported now
    """

    def __init__(
        self, group: str, builtins: Mapping[str, T], convert: Callable[[Any], T] | None = None
    ) -> None:
        self.group = group
        self._objects = dict(builtins)
        self._convert = convert

    def __getitem__(self, name: str) -> T:
        """Return the object of a name.

        Raises:
            KeyError: If nothing has the name.
            ConfigError: If its extension cannot be imported, or several have the name.
        """
        points = self._points().get(name, [])
        if name not in self._objects:
            self._objects[name] = self._load(name, points)
        return self._objects[name]

    def __setitem__(self, name: str, value: T) -> None:
        """Register an object in this process only."""
        self._objects[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove an object that was registered in this process."""
        del self._objects[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, those of the core first; extensions that are missing left out."""
        yield from self._objects
        for name, points in self._points().items():
            if name not in self._objects and _exists(points[0]):
                yield name

    def __contains__(self, name: object) -> bool:
        """Return whether a name is registered, without loading its object."""
        return name in set(self)

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(1 for _ in self)

    def loadable(self) -> dict[str, T]:
        """Return all objects but those of extensions that cannot be imported."""
        return {name: self[name] for name in self if self.problem(name) is None}

    def find(self, name: str) -> T | None:
        """Return the object of a name; None if its extension is removed."""
        points = self._points().get(name)
        return None if points is None or not _exists(points[0]) else self[name]

    def missing(self) -> list[str]:
        """Return a line for each registered extension whose module is not installed."""
        points = self._points()
        names = [
            name for name in points if name not in self._objects and not _exists(points[name][0])
        ]
        return [str(self.problem(name)) for name in names]

    def problem(self, name: str) -> str | None:
        """Return why a registered name cannot be used; None if it can, or is not registered."""
        points = self._points().get(name)
        if points is None:
            return None
        if not _exists(points[0]):
            return f"{name!r} is provided by {points[0].module}, which is not installed"
        try:
            self[name]
        except ConfigError as error:
            return error.problems[0]
        return None

    def _points(self) -> Mapping[str, list[EntryPoint]]:
        return _entry_points(self.group)

    def _load(self, name: str, points: list[EntryPoint]) -> T:
        if not points:
            raise KeyError(name)
        if len(points) > 1:
            owners = " and ".join(sorted(map(_owner, points)))
            raise ConfigError(self.group, [f"{name}: is registered by {owners}; uninstall one"])
        try:
            loaded = points[0].load()
            return self._convert(loaded) if self._convert else loaded
        except (Exception, SystemExit) as error:  # whatever the code of others raises
            problem = f"{name}: {_owner(points[0])} provides it as {points[0].value}, which "
            raise ConfigError(
                self.group, [f"{problem}cannot be used: {_reason(points[0], error)}"]
            ) from error


PARTS: Registry[Any] = Registry("zerolab.parts", {})
"""Modules of extensions that the core uses if installed; see docs/contribute/architecture.md."""


def subclass_of(
    base: type[C], attribute: str | None = None, default: type[C] | None = None
) -> Callable[[Any], type[C]]:
    """Return a ``convert`` of :class:`Registry` that accepts only subclasses of a class.

    Args:
        base: Base class.
        attribute: Attribute of the registered object that has the class; None for itself.
        default: Class if the attribute is missing.
    """

    def convert(loaded: Any) -> type[C]:
        value = getattr(loaded, attribute, default) if attribute else loaded
        if not (isinstance(value, type) and issubclass(value, base)):
            subject = f"its `{attribute}` " if attribute else ""
            raise TypeError(f"{subject}must be a subclass of {base.__name__}, got {value!r}")
        return value

    return convert


def _owner(point: EntryPoint) -> str:
    return _name(point.dist) if point.dist else _DISTRIBUTION


@cache
def _name(distribution: Distribution) -> str:
    return distribution.name  # parses all of its metadata


def _reason(point: EntryPoint, error: BaseException) -> str:
    if not point.pattern.match(point.value):
        return "must be module:object"
    is_clear = isinstance(error, ImportError | AttributeError | TypeError)
    return str(error) if is_clear else f"{type(error).__name__}: {error}"


@cache
def _exists(point: EntryPoint) -> bool:
    """Return whether a module can be found; True if its package fails, which loading reports."""
    try:
        return importlib.util.find_spec(point.module) is not None
    except ImportError:
        return False
    except (Exception, SystemExit):  # noqa: BLE001 - whatever the package of others raises
        return True


@cache
def _entry_points(group: str) -> Mapping[str, list[EntryPoint]]:
    """Return the entry points of a group by name, our own first."""
    points: dict[str, list[EntryPoint]] = defaultdict(list)
    of_checkout = _checkout_points(group)
    for name, value in (of_checkout or {}).items():
        points[name].append(EntryPoint(name, value, group))
    for point in sorted(_installed_points(group), key=lambda point: _owner(point) != _DISTRIBUTION):
        # Our own installation may be older than the checkout that it refers to.
        if of_checkout is None or _owner(point) != _DISTRIBUTION:
            points[point.name].append(point)
    return points


def _installed_points(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a group of all installed distributions."""
    names: set[str] = set()
    for distribution, text in _entry_point_files():
        if (
            f"[{group}]" in text and _name(distribution) not in names
        ):  # the first on the path counts
            names.add(_name(distribution))
            yield from distribution.entry_points.select(group=group)


@cache
def _entry_point_files() -> Sequence[tuple[Distribution, str]]:
    """Return the distributions that have entry points, with the text that declares them.

    ``importlib.metadata.entry_points`` would also parse those of all other programs, which takes
    three times as long.
    """
    distributions = importlib.metadata.distributions()
    files = [(item, item.read_text("entry_points.txt")) for item in distributions]
    return [(distribution, text) for distribution, text in files if text]


def _checkout_points(group: str) -> Mapping[str, str] | None:
    """Return our entry points of a group from ``pyproject.toml``; None outside of a checkout.

    A checkout works without an installation.
    """
    text = _checkout_text()
    if text is None:
        return None
    _, _, rest = text.partition(f'[project.entry-points."{group}"]')
    table = rest.partition("\n[")[0]
    # tomllib takes 4 ms. A command of a group has a quoted key: "agent list".
    return dict(re.findall(r'^"?([\w -]+?)"? = "([^"]+)"', table, re.MULTILINE))


@cache
def _checkout_text() -> str | None:
    text = _CHECKOUT.read_text(encoding="utf-8") if _CHECKOUT.is_file() else ""
    return text if f'\nname = "{_DISTRIBUTION}"\n' in text else None
