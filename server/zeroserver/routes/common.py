"""Parameters and answers that many routes share."""

from typing import Annotated, Any, Literal

from fastapi import Path, Query

from zeroserver.resources import ErrorAnswer

__all__ = ["ERRORS", "After", "IdPath", "Level", "Limit", "LineCursor", "Rank", "Tail"]

MAX_ID = 2**53

IdPath = Annotated[int, Path(ge=1, le=MAX_ID)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most rows of a page.")]
After = Annotated[str | None, Query(max_length=500, description="next_after of the page before.")]
LineCursor = Annotated[int, Query(ge=0, le=MAX_ID, description="Lines after the one of this id.")]
Tail = Annotated[int | None, Query(ge=1, le=10_000, description="Only so many lines, the last.")]
Rank = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_MEANINGS = {
    400: "The request is not understood.",
    401: "No valid token.",
    403: "The token allows less than this.",
    404: "There is no such thing.",
    409: "Its state does not allow it.",
    413: "Too large.",
    422: "Something in the request does not hold; `problems` lists all of it.",
    503: "The database cannot take it now; try again.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _MEANINGS.items()
}
