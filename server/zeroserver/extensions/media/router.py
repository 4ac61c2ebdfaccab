"""Routes of media: names, list, download and deletion."""

from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath
from typing import Annotated

import msgspec
from fastapi import Depends, Path, Query
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import ColumnElement, Connection, func, select, true, tuple_
from starlette.concurrency import run_in_threadpool

from zerolab.contract.media import CONTENT_TYPES, download_name
from zerolab.errors import ConfigError, NotFoundError
from zeroserver.access.routes import ACCESS, own, shown
from zeroserver.api.common import FILE_ANSWER, MAX_ID, After, IdPath, Limit, Whole
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.media.resources import (
    Media,
    MediaKind,
    MediaName,
    MediaNamePage,
    MediaPage,
    RemovedMedia,
)
from zeroserver.extensions.media.service import MediaRemoval
from zeroserver.orchestrator.state import owner_of, stored_address
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ExperimentRow, MediaRow, TrialRow, find_row, read_rows
from zeroserver.store.schema import media

__all__ = ["router"]

router = resource_router("/api/v1/trials", "media")

ACCESS.update(
    {
        "GET /api/v1/trials/{trial_id}/media": shown("trial"),
        "DELETE /api/v1/trials/{trial_id}/media": own("trial"),
        "GET /api/v1/trials/{trial_id}/media/names": shown("trial"),
        "GET /api/v1/trials/{trial_id}/media/{digest}": shown("trial"),
    }
)

_SMALL = 256 * 1024
"""Maximum size of a file that one thread reads at once, in bytes; pieces cost a switch each."""
_CACHED = "private, max-age=31536000, immutable"
"""For a file that is named by its content."""

NameQuery = Annotated[str | None, Query(max_length=200, description="Only media of this name.")]
StepQuery = Annotated[Whole | None, Query(ge=0, le=MAX_ID, description="Only media of this step.")]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the content.")]


def _selected(name: str | None, step: int | None) -> ColumnElement[bool]:
    condition = true() if name is None else media.c.name == name
    return condition if step is None else condition & (media.c.step == step)


@router.get("/{trial_id}/media/names")
async def list_media_names(services: ServicesDep, trial_id: IdPath) -> MediaNamePage:
    """List the names of a trial's media, with their number, steps and size."""

    def read(connection: Connection) -> MediaNamePage:
        find_row(connection, TrialRow, trial_id)
        columns = media.c
        query = (
            select(
                columns.name, columns.type, func.count(), func.min(columns.step),
                func.max(columns.step), func.sum(columns.size),
            )
            .where(columns.trial_id == trial_id)
            .group_by(columns.name, columns.type)
            .order_by(columns.name, columns.type)
        )  # fmt: skip
        rows = connection.execute(query)
        return MediaNamePage([
            MediaName(name, kind, int(count), int(first), int(last), int(size))
            for name, kind, count, first, last, size in rows
        ])  # fmt: skip

    return await services.read(read)


async def _list_filters(
    name: NameQuery = None,
    type: MediaKind | None = None,  # noqa: A002 - the name of the parameter
    step: StepQuery = None,
    after: After = None,
    limit: Limit = 100,
) -> tuple[ColumnElement[bool], int]:
    condition = _selected(name, step)
    if type is not None:
        condition &= media.c.type == type
    if after is not None:
        columns = tuple_(media.c.name, media.c.step, media.c.position)
        condition &= columns > tuple_(*_cursor(after))
    return condition, limit


ListFilters = Annotated[tuple[ColumnElement[bool], int], Depends(_list_filters)]
"""Condition on the media of a list, and the maximum number of a page."""


@router.get("/{trial_id}/media")
async def list_media(services: ServicesDep, trial_id: IdPath, filters: ListFilters) -> MediaPage:
    """List a trial's media, sorted by name, step and position."""
    condition, limit = filters

    def read(connection: Connection) -> MediaPage:
        find_row(connection, TrialRow, trial_id)
        query = (
            select(media)
            .where(media.c.trial_id == trial_id, condition)
            .order_by(media.c.name, media.c.step, media.c.position)
            .limit(limit + 1)
        )
        rows = read_rows(connection, MediaRow, query)
        last = rows[limit - 1] if len(rows) > limit else None
        next_after = f"{last.step}.{last.position}.{last.name}" if last is not None else None
        return MediaPage([_resource(row) for row in rows[:limit]], next_after)

    return await services.read(read)


def _cursor(after: str) -> tuple[str, int, int]:
    step, _, rest = after.partition(".")
    position, _, name = rest.partition(".")
    if not (step.isdecimal() and position.isdecimal() and len(step) < 17 and len(position) < 5):
        problem = f"after: must be next_after of the previous page, got {after[:50]!r}"
        raise ConfigError("request", [problem])
    return name, int(step), int(position)


def _resource(row: MediaRow) -> Media:
    return Media.of(row, file_name=_file_name(row))


def _file_name(row: MediaRow) -> str:
    metadata = msgspec.json.decode(row.metadata)
    return download_name(row.name, row.step, row.position, row.suffix, metadata)


@router.get("/{trial_id}/media/{digest}", response_class=StreamingResponse, responses=FILE_ANSWER)
async def get_media_file(services: ServicesDep, trial_id: IdPath, digest: Digest) -> Response:
    """Download the content of a medium from the checkpoint storage.

    Images and audio have their content type. Everything else is sent as an attachment of unknown
    type, so that no browser executes it.
    """

    def read(connection: Connection) -> tuple[MediaRow, ExperimentRow]:
        experiment_id = find_row(connection, TrialRow, trial_id).experiment_id
        of_digest = (media.c.trial_id == trial_id, media.c.digest == digest)
        rows = read_rows(connection, MediaRow, select(media).where(*of_digest).limit(1))
        if not rows:
            raise NotFoundError(f"trial {trial_id} has no media with digest {digest}")
        return rows[0], find_row(connection, ExperimentRow, experiment_id)

    row, experiment = await services.read(read)
    content_type = CONTENT_TYPES.get(row.suffix.lower())
    shown = content_type is not None and row.type in {"image", "audio"}
    disposition = "inline" if shown else "attachment"
    name = PurePath(_file_name(row)).name.encode("ascii", "replace").decode().replace("?", "_")
    headers = {
        "Content-Disposition": f'{disposition}; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": _CACHED,
    }
    served = content_type if shown else "application/octet-stream"
    if row.size <= _SMALL:
        content = await run_in_threadpool(lambda: b"".join(_pieces(services, row, experiment)))
        return Response(content, media_type=served, headers=headers)
    pieces = await run_in_threadpool(_pieces, services, row, experiment)
    return StreamingResponse(pieces, media_type=served, headers=headers)


def _pieces(services: Services, row: MediaRow, experiment: ExperimentRow) -> Iterator[bytes]:
    from zerolab.storage.media import MediaStore

    address = stored_address(services.orchestrator.home, experiment)
    store = MediaStore(address, owner_of(services.orchestrator, row.trial_id))
    pieces = store.pieces(row.digest, row.size)
    # Read the first piece now: a failure can still become an error response.
    return chain([next(pieces, b"")], pieces)


@router.delete("/{trial_id}/media")
async def delete_media(
    services: ServicesDep, trial_id: IdPath, name: NameQuery = None, step: StepQuery = None
) -> RemovedMedia:
    """Delete media of an ended trial: all, or those of a name or a step."""
    condition = _selected(name, step)
    count, size = await services.write(lambda work: MediaRemoval(work).remove(trial_id, condition))
    return RemovedMedia(count, size)
