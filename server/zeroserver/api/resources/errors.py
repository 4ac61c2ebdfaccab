"""Error response."""

from zeroserver.api.rows import Resource

__all__ = ["ErrorAnswer", "ErrorBody"]


class ErrorBody(Resource, frozen=True):
    """What went wrong."""

    type: str
    message: str
    problems: list[str]


class ErrorAnswer(Resource, frozen=True):
    """Body of every answer of 400 and above."""

    error: ErrorBody
