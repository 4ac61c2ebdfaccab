"""Names of DeepSpeed that have no counterpart: they import, and fail when they are used.

``unsupported.json`` has, by module (or class), replacements and the names that they apply to.
Any other name of any module below ``deepspeed`` gets a placeholder too, without such a remedy.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from zerolab.errors import EngineError

__all__ = ["MissingConstant", "MissingName", "methods", "missing_name", "remedy_of_module"]


class MissingName:
    """Placeholder of a class, function or module that has no counterpart.

    A script can import it, annotate with it, derive a class from it, and ask whether an object is
    an instance of it: none is. Calling it, or reading an attribute of it, is an error.
    """

    def __init__(self, fullname: str, remedy: str) -> None:
        self._fullname = fullname
        self._remedy = remedy
        self.__module__, _, self.__name__ = fullname.rpartition(".")
        self.__qualname__ = self.__name__

    def _message(self) -> str:
        text = "Zerolab replaces deepspeed, and does not provide it"
        return f"{self._fullname}: {text}{self._remedy}"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise the error that names the missing part and its remedy."""
        raise EngineError(self._message())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by pickle and copy, before there are attributes
            raise AttributeError(name)
        raise AttributeError(self._message(), name=name, obj=self)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            raise EngineError(self._message())

        return (type(self.__name__, (), {"__new__": refuse}),)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any  # in annotations

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<no counterpart of {self._fullname}>"


class MissingConstant(MissingName):
    """Placeholder of a constant: every use of its value is an error."""

    __hash__ = object.__hash__


def _refusing(method: str) -> Callable[..., NoReturn]:
    def refuse(self: MissingConstant, *args: Any) -> NoReturn:
        raise EngineError(self._message())

    refuse.__name__ = method
    return refuse


for _method in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "str", "format", "len", "iter", "contains"),
    *("getitem", "setitem", "int", "float", "index", "add", "radd", "sub", "mul", "fspath"),
):
    setattr(MissingConstant, f"__{_method}__", _refusing(f"__{_method}__"))


@cache
def missing_name(module: str, name: str) -> MissingName:
    """Make the placeholder of a name, the same one each time.

    Args:
        module: Of DeepSpeed, dotted.
        name: In it.
    """
    remedy = _remedies(module).get(name)
    hint = f": {remedy}" if remedy else remedy_of_module(f"{module}.{name}")
    return (MissingConstant if name.isupper() else MissingName)(f"{module}.{name}", hint)


def remedy_of_module(fullname: str) -> str:
    """Return what to use instead of a DeepSpeed module or its members; empty if unknown.

    Args:
        fullname: Dotted name.
    """
    parts = fullname.split(".")
    for count in range(len(parts), 1, -1):
        within = ".".join(parts[:count])
        remedy = _remedies(".".join(parts[: count - 1])).get(parts[count - 1])
        of_its_names = set(_remedies(within).values())
        if remedy is None and len(of_its_names) == 1:
            (remedy,) = of_its_names
        if remedy is not None:
            return f": {remedy}"
    return ""


def methods(kind: str) -> dict[str, str]:
    """Methods of one of DeepSpeed's classes that have no counterpart, to what to use instead."""
    return _remedies(kind)


@cache
def _remedies(home: str) -> dict[str, str]:
    return {
        name: remedy_.replace("`", "")
        for remedy_, names in _table().get(home, {}).items()
        for name in names
    }


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    file = Path(__file__).with_name("unsupported.json")
    table: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return table
