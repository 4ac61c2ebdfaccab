"""Parameters and answers that many routes share."""

from typing import Annotated, Any, Literal

from fastapi import Path, Query

from zeroserver.api.resources import ErrorAnswer

__all__ = ["After", "IdPath", "Level", "Limit", "LineCursor", "Rank", "Tail", "add_errors"]

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


def add_errors(document: dict[str, Any]) -> None:
    """Give every operation of an OpenAPI document the errors that any route may answer.

    FastAPI could do it, at 0.2 s for every start of the server.
    """
    template = "#/components/schemas/{model}"
    schema = ErrorAnswer.model_json_schema(ref_template=template)
    document["components"]["schemas"] |= {**schema.pop("$defs"), "ErrorAnswer": schema}
    content = {"application/json": {"schema": {"$ref": template.format(model="ErrorAnswer")}}}
    errors = {
        str(status): {"description": text, "content": content} for status, text in _MEANINGS.items()
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            own = {
                status: each
                for status, each in operation["responses"].items()
                if status < "400" or "x-own" in each  # not FastAPI's own 422
            }
            operation["responses"] = errors | own
