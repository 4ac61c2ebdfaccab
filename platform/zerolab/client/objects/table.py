"""Lists of objects that notebooks show as tables."""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from zerolab.client.libraries import library
from zerolab.client.objects.server_object import ServerObject, display_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ObjectList", "html_rows"]

_SHOWN_ROWS = 50

T = TypeVar("T", bound=ServerObject)


class ObjectList(list[T]):
    """List of objects, which a notebook shows as a table.

    Example:
        >>> client = zerolab.Client()
        >>> client.experiment(1).trials()
        [Trial(1, state='COMPLETED', best_validation=0.01),
         Trial(2, state='COMPLETED', best_validation=0.02)]
    """

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each object.

        Returns:
            Frame with the fields as columns; nested fields have dotted names such as
            ``hparams.lr``. Times are ``datetime64``.

        Raises:
            ConfigError: If pandas is not installed.

        Example:
            >>> client = zerolab.Client()
            >>> frame = client.experiment(1).trials().to_pandas()
            >>> frame[["hparams.lr", "best_validation"]].values.tolist()
            [[0.1, 0.01], [0.2, 0.02]]
        """
        pandas = library("pandas", "to_pandas")
        rows = [
            {
                name: getattr(item, name) if name in item._readers else value  # noqa: SLF001
                for name, value in item.items()
            }
            for item in self
        ]
        frame: pd.DataFrame = pandas.json_normalize(rows)
        return frame

    def _repr_html_(self) -> str:
        if not self:
            return "<p>none</p>"
        names = self[0]._row or tuple(self[0])  # noqa: SLF001 - same module family
        return html_rows(names, self)


def html_rows(names: tuple[str, ...], rows: list[Any]) -> str:
    """Return a table of dictionaries for notebooks, with all text escaped.

    Args:
        names: Fields that are shown, one column each.
        rows: Dictionaries; the first 50 are shown.
    """
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(f"<tr>{_cells(names, row)}</tr>" for row in rows[:_SHOWN_ROWS])
    omitted = len(rows) - _SHOWN_ROWS
    more = f"<p>and {omitted} more</p>" if omitted > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cells(names: tuple[str, ...], row: Mapping[str, Any]) -> str:
    return "".join(f"<td>{escape(display_text(row.get(name)))}</td>" for name in names)
