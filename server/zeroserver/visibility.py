"""Projects that the caller of a request must not see, and the rewriting of its queries.

A project can be restricted to members. The guard sets :data:`HIDDEN` for each request of a user who
is not a member, and every query of that request then reads restricted tables without the rows of
these projects. Other requests, and the writer thread, see all rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["EVERYTHING", "HIDDEN", "hiding", "visible_rows"]

EVERYTHING: frozenset[int] = frozenset()
"""Value of :data:`HIDDEN` for callers who see all projects."""

HIDDEN: ContextVar[frozenset[int]] = ContextVar("hidden_projects", default=EVERYTHING)
"""Ids of the projects that the caller of the current request must not see."""

_BY_PROJECT = {"models": "project_id", "projects": "id"}
_BY_EXPERIMENT = ("trials", "checkpoints", "logs", "notifications", "comments")


@contextmanager
def hiding(projects: frozenset[int]) -> Iterator[None]:
    """Hide projects from the queries of the current context.

    Args:
        projects: Ids of the projects; empty to see all.
    """
    token = HIDDEN.set(projects)
    try:
        yield
    finally:
        HIDDEN.reset(token)


def visible_rows(statement: str, *, sqlite: bool) -> str:
    """Return a query that reads only the rows that the caller of the request may see.

    Args:
        statement: SQL; only ``SELECT`` and ``WITH`` are changed.
        sqlite: Whether the database is SQLite.

    Example:
        >>> from zeroserver.visibility import visible_rows
        >>> visible_rows("SELECT 1", sqlite=True)
        'SELECT 1'
    """
    hidden = HIDDEN.get()
    if not hidden:
        return statement
    text = statement.lstrip()
    start = text[:6].upper()
    if start != "SELECT" and not start.startswith("WITH"):
        return statement
    # Expressions with the names of the tables replace them in the query. The one of `experiments`
    # is the last, since in PostgreSQL the others would read it instead of the table.
    schema = "main." if sqlite else ""
    ids = ", ".join(str(int(project)) for project in sorted(hidden))
    hidden_experiments = f"SELECT id FROM {schema}experiments WHERE project_id IN ({ids})"  # noqa: S608 - numbers
    tables = dict.fromkeys(_BY_EXPERIMENT, f"experiment_id NOT IN ({hidden_experiments})") | {
        table: f"{column} NOT IN ({ids})"
        for table, column in (*_BY_PROJECT.items(), ("experiments", "project_id"))
    }  # fmt: skip
    expressions = ", ".join(
        f"{table} AS (SELECT * FROM {schema}{table} WHERE {condition})"  # noqa: S608 - our own names
        for table, condition in tables.items()
    )
    if start.startswith("WITH"):
        return f"WITH {expressions}, {text[4:].lstrip()}"
    return f"WITH {expressions} {text}"
