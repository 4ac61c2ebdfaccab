"""Lookup of checkpoints by a prefix of their uuid."""

import re

from sqlalchemy import Connection, select

from zerolab.errors import ConfigError
from zeroserver.store.schema import checkpoints

__all__ = ["full_uuid"]

_SHORT = re.compile(r"[0-9a-f][0-9a-f-]{3,35}")
_TOO_SHORT = re.compile(r"[0-9a-f]{1,3}")
_SHOWN = 5


def full_uuid(connection: Connection, text: str) -> str:
    """Expand the prefix of a checkpoint's uuid to the whole uuid.

    Args:
        connection: Connection to the database.
        text: A uuid, or at least its first four characters.

    Returns:
        The uuid; the text itself if no checkpoint matches.

    Raises:
        ConfigError: If several checkpoints match, or it has fewer than four characters.

    Example:
        ``full_uuid(connection, "72e698f0")`` is ``"72e698f0-1c04-4f0e-9b1a-5d3f6f1f0c11"``.
    """
    short = text.strip().lower()
    if _TOO_SHORT.fullmatch(short):
        problem = (
            f"must have at least the first four characters, got {text!r}; give more characters"
        )
        raise ConfigError("checkpoint", [f"uuid: {problem}"])
    if not _SHORT.fullmatch(short):
        return text
    column = checkpoints.c.uuid
    # A range query can use the index: "g" sorts after every character of a uuid.
    query = select(column).where(column >= short, column < f"{short}g").order_by(column)
    matches = connection.scalars(query.limit(_SHOWN + 1)).all()
    if len(matches) > 1:
        more = ", ..." if len(matches) > _SHOWN else ""
        problem = f"must name one checkpoint, got {text!r}, which several begin with"
        shown = ", ".join(matches[:_SHOWN])
        raise ConfigError("checkpoint", [f"uuid: {problem}: {shown}{more}; give more characters"])
    return matches[0] if matches else text
