"""Read of one row of a table by its key."""

from functools import cache
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, bindparam, select

from zerolab.errors import NotFoundError

__all__ = ["one"]


def one(connection: Connection, table: Table, row_id: int | str) -> RowMapping:
    """Return one row, by id (checkpoints: by uuid).

    Raises:
        NotFoundError: If there is none.
    """
    query = _query_for_one(table, "uuid" if isinstance(row_id, str) else "id")
    row = connection.execute(query, {"wanted": row_id}).mappings().one_or_none()
    if row is None:
        msg = f"there is no {table.name.removesuffix('s')} {row_id}"
        raise NotFoundError(msg)
    return row


@cache
def _query_for_one(table: Table, column: str) -> Select[Any]:
    """Nearly every request asks it: to make it takes longer than to answer it."""
    return select(table).where(table.c[column] == bindparam("wanted"))
