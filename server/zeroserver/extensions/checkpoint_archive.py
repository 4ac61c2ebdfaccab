"""Route that downloads a checkpoint as one tar archive."""

import tarfile
from collections.abc import Iterator
from itertools import chain

from fastapi.responses import StreamingResponse
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from zerolab.errors import StorageError
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.api.checkpoints import open_store, stored_rows
from zeroserver.api.strict_route import resource_router
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import CheckpointRow, ExperimentRow

__all__ = ["router"]

router = resource_router("/api/v1", "checkpoints")

ACCESS["GET /api/v1/checkpoints/{uuid}/archive"] = VIEWER

_MEDIA_TYPE = "application/x-tar"
_END = bytes(2 * tarfile.BLOCKSIZE)


@router.get(
    "/checkpoints/{uuid}/archive",
    response_class=StreamingResponse,
    responses={200: {"content": {_MEDIA_TYPE: {}}, "description": "The archive."}},
)
async def get_checkpoint_archive(services: ServicesDep, uuid: str) -> StreamingResponse:
    """Download all files of a checkpoint as one tar archive."""

    def rows(connection: Connection) -> tuple[CheckpointRow, ExperimentRow]:
        return stored_rows(connection, uuid)

    row, experiment = await services.read(rows)
    size, pieces = await run_in_threadpool(_archive, services, row, experiment)
    name = f"checkpoint-{row.uuid[:8]}.tar"
    # With the size, a client detects an incomplete archive.
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Length": str(size),
    }
    return StreamingResponse(pieces, media_type=_MEDIA_TYPE, headers=headers)


def _archive(
    services: Services, row: CheckpointRow, experiment: ExperimentRow
) -> tuple[int, Iterator[bytes]]:
    """Return the size of an archive and its content, which is read from the storage in pieces.

    The content ends with a StorageError if a file changes during the download.

    Args:
        services: Services of the server.
        row: The checkpoint.
        experiment: Its experiment, whose storage is read.

    Raises:
        ConflictError: If the files are deleted.
        NotFoundError: If a file is missing or has the wrong size.
    """
    from zerolab.storage.backends import DESCRIPTION_FILE

    store = open_store(services, row, experiment)
    stored = store.describe(row.uuid)
    description = stored.to_json()
    contents = [
        (name, size, store.pieces(row.uuid, name, 0, size))
        for name, size in sorted(stored.resources.items())
    ]
    contents.append((DESCRIPTION_FILE, len(description), iter([description])))
    total, entries = len(_END), []
    for name, size, content in contents:
        header = tarfile.TarInfo(f"checkpoint-{row.uuid[:8]}/{name}")
        header.size, header.mtime = size, int(row.created_at or 0)
        before, after = header.tobuf(tarfile.PAX_FORMAT), bytes(-size % tarfile.BLOCKSIZE)
        total += len(before) + size + len(after)
        changed = f"checkpoint {row.uuid}: {name} has changed during the download"
        entries.append(chain([before], _exactly(size, content, changed), [after]))
    return total, chain(chain.from_iterable(entries), [_END])


def _exactly(size: int, content: Iterator[bytes], problem: str) -> Iterator[bytes]:
    """Yield the content of a file; raise StorageError if it is shorter than ``size``."""
    read = 0
    for piece in content:
        read += len(piece)
        yield piece
    if read != size:
        raise StorageError(problem)
