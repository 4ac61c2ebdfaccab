"""Routes of comments."""

from typing import Annotated, Any

from fastapi import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, Select, delete, func, select, update

from zerolab.errors import ConfigError, ConflictError, ForbiddenError, NotFoundError
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, VIEWER, own
from zeroserver.api.common import After, IdPath, Limit, PlainText, id_of
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.comments.resources import Comment, CommentAnswer, CommentPage
from zeroserver.orchestrator.service import Service
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import CommentRow, ExperimentRow, find_row, read_rows
from zeroserver.store.schema import comments

__all__ = ["router"]

router = resource_router("/api/v1", "comments")

ACCESS.update(
    {
        "GET /api/v1/experiments/{experiment_id}/comments": VIEWER,
        "POST /api/v1/experiments/{experiment_id}/comments": MEMBER,
        "PATCH /api/v1/comments/{comment_id}": own("comment"),
        "DELETE /api/v1/comments/{comment_id}": own("comment"),
    }
)

_MAX_COMMENTS = 1000
"""Maximum number of comments on an experiment."""


class _CommentService(Service):
    """Creates and changes comments."""

    def add(self, experiment_id: int, author_id: int, text: str) -> int:
        """Store a comment and return its id.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If it has too many comments.
        """
        self.work.find(ExperimentRow, experiment_id)
        of_experiment = comments.c.experiment_id == experiment_id
        count = select(func.count()).select_from(comments).where(of_experiment)
        if (self.work.connection.scalar(count) or 0) >= _MAX_COMMENTS:
            raise ConflictError(f"there are {_MAX_COMMENTS} comments; delete one first")
        row = {
            "experiment_id": experiment_id,
            "owner_id": author_id,
            "text": text,
            "created_at": self.work.clock(),
        }
        query = comments.insert().values(row).returning(comments.c.id)
        return int(self.work.connection.execute(query).scalar_one())

    def edit(self, comment_id: int, author_id: int, text: str) -> None:
        """Replace the text of a comment.

        Raises:
            NotFoundError: If there is no such comment.
            ForbiddenError: If another user wrote it.
        """
        query = select(comments.c.owner_id).where(comments.c.id == comment_id)
        stored_author = self.work.connection.scalar(query)
        if stored_author is None:
            raise _missing(comment_id)
        if stored_author != author_id:  # an administrator
            raise ForbiddenError(f"comment {comment_id}: only its author may change its text")
        values = {"text": text, "edited_at": self.work.clock()}
        change = update(comments).where(comments.c.id == comment_id).values(values)
        self.work.connection.execute(change)

    def remove(self, comment_id: int) -> None:
        """Delete a comment.

        Raises:
            NotFoundError: If there is no such comment.
        """
        query = delete(comments).where(comments.c.id == comment_id)
        if self.work.connection.execute(query).rowcount == 0:
            raise _missing(comment_id)


def _missing(comment_id: int) -> NotFoundError:
    return NotFoundError(f"there is no comment {comment_id}")


def _read(services: Services, connection: Connection, query: Select[Any]) -> list[Comment]:
    users = services.orchestrator.users
    rows = read_rows(connection, CommentRow, query)
    return [Comment.of(row, author=users.name_of(row.owner_id)) for row in rows]


async def _one(services: Services, comment_id: int) -> CommentAnswer:
    query = select(comments).where(comments.c.id == comment_id)
    found = await services.read(lambda connection: _read(services, connection, query))
    if not found:  # deleted concurrently
        raise _missing(comment_id)
    return CommentAnswer(found[0])


@router.get("/experiments/{experiment_id}/comments")
async def list_comments(
    services: ServicesDep, experiment_id: IdPath, after: After = None, limit: Limit = 100
) -> CommentPage:
    """List the comments on an experiment, oldest first."""
    last = 0 if after is None else id_of(after)
    if last is None:
        raise ConfigError("request", [f"after: must be an id, got {after!r}"])
    columns = comments.c
    query = select(comments).where(columns.experiment_id == experiment_id, columns.id > last)
    query = query.order_by(columns.id).limit(limit + 1)

    def read(connection: Connection) -> list[Comment]:
        find_row(connection, ExperimentRow, experiment_id)
        return _read(services, connection, query)

    found = await services.read(read)
    page = found[:limit]
    return CommentPage(page, str(page[-1].id) if len(found) > limit else None)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


class CommentBody(BaseModel):
    """Text of a comment."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[PlainText, Field(max_length=10_000), AfterValidator(_not_blank)]
    """Plain text, 1 to 10,000 characters."""


@router.post("/experiments/{experiment_id}/comments", status_code=201)
async def add_comment(
    services: ServicesDep, principal: PrincipalDep, experiment_id: IdPath, body: CommentBody
) -> CommentAnswer:
    """Add a comment of the user to an experiment, also of another user."""
    comment_id = await services.write(
        lambda work: _CommentService(work).add(experiment_id, principal.user_id, body.text)
    )
    return await _one(services, comment_id)


@router.patch("/comments/{comment_id}")
async def edit_comment(
    services: ServicesDep, principal: PrincipalDep, comment_id: IdPath, body: CommentBody
) -> CommentAnswer:
    """Replace the text of a comment; only for its author."""
    await services.write(
        lambda work: _CommentService(work).edit(comment_id, principal.user_id, body.text)
    )
    return await _one(services, comment_id)


@router.delete("/comments/{comment_id}", status_code=204)
async def delete_comment(services: ServicesDep, comment_id: IdPath) -> Response:
    """Delete a comment; only for its author and administrators."""
    await services.write(lambda work: _CommentService(work).remove(comment_id))
    return Response(status_code=204)
