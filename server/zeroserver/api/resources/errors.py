"""Error response."""

from zeroserver.api.rows import Resource

__all__ = ["ErrorAnswer", "ErrorBody"]


class ErrorBody(Resource, frozen=True):
    """Error with its type and message."""

    type: str
    message: str
    problems: list[str]


class ErrorAnswer(Resource, frozen=True):
    """Body of every response with a status of 400 or above."""

    error: ErrorBody
