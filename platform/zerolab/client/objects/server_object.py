"""Base class of the client's objects: a dictionary with typed attributes."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self

from zerolab.client.objects.interface import ClientMethods
from zerolab.formatting import html_table

__all__ = ["ServerObject", "display_text", "to_number"]


class ServerObject(dict[str, Any]):
    """Resource of the server with typed attributes and methods.

    It is also the JSON resource of the REST reference: ``experiment["state"]`` and
    ``experiment.state`` are the same. An attribute is a :class:`datetime.datetime` where the JSON
    has a time, and a number where the JSON has ``"NaN"`` or ``"Infinity"``.

    Pickling and copying make plain dictionaries, without the connection to the server.

    Args:
        client: Client that has read the resource, and that the methods use.
        fields: JSON resource.

    Example:
        >>> client = zerolab.Client()
        >>> experiment = client.experiment(1)
        >>> experiment
        Experiment(1, name='digits', state='COMPLETED')
        >>> experiment.best_validation == experiment["best_validation"]
        True
        >>> experiment.created_at.year > 2000
        True
    """

    _readers: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    """Conversions of JSON values, by field."""
    _shown: ClassVar[tuple[str, ...]] = ()
    """Fields of the short representation, the first one without its name."""
    _row: ClassVar[tuple[str, ...]] = ()
    """Fields of the tables in notebooks; all without any."""

    def __init__(self, client: ClientMethods, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._client = client

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = {name: str(hint) for name, hint in cls.__annotations__.items()}
        own = {
            name: reader
            for name, hint in hints.items()
            for part, reader in _READERS.items()
            if part in hint and not name.startswith("_")
        }
        cls._readers = {**cls._readers, **own}

    def __getattr__(self, name: str) -> Any:
        """Return a field of the resource."""
        try:
            value = self[name]
        except KeyError:
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}") from None
        reader = self._readers.get(name)
        return value if value is None or reader is None else reader(value)

    def __dir__(self) -> list[str]:
        """Return the attributes for completion."""
        return [*super().__dir__(), *self]

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copy and pickle the fields only."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        first, *others = (name for name in self._shown if name in self)
        texts = [repr(self[first]), *(f"{name}={self[name]!r}" for name in others)]
        return f"{type(self).__name__}({', '.join(texts)})"

    def _repr_html_(self) -> str:
        names = self._row or tuple(self)
        rows = {name.replace("_", " "): display_text(self[name]) for name in names if name in self}
        return html_table(f"{type(self).__name__} {self[self._shown[0]]}", rows)

    def _update(self, fields: Mapping[str, Any]) -> Self:
        """Replace all fields."""
        self.clear()
        self.update(fields)
        return self


def to_number(value: float | str) -> float:
    """Convert a number of the REST API, in which NaN and infinities are texts."""
    return float(value)


def display_text(value: Any) -> str:
    """Return a value as people read it in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={display_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(display_text(item) for item in value)
    return str(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": to_number,
    "datetime": datetime.fromisoformat,
    "dict[str, float]": lambda values: {name: to_number(value) for name, value in values.items()},
}
"""Conversions by a part of a field's type; the last one that matches applies."""
