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
    # The size is announced, so that a client notices that an archive is incomplete.
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Length": str(size),
    }
    return StreamingResponse(pieces, media_type=_MEDIA_TYPE, headers=headers)


def _archive(
    services: Services, row: CheckpointRow, experiment: ExperimentRow
) -> tuple[int, Iterator[bytes]]:
    """Return the size of an archive and its content, which is read from the storage in pieces.

    Raises:
        ConflictError: If the files are deleted.
        NotFoundError: If a file is missing or has the wrong size.
    """
    store = open_store(services, row, experiment)
    stored = store.describe(row.uuid)
    description = stored.to_json()

    def header(name: str, size: int) -> bytes:
        entry = tarfile.TarInfo(f"checkpoint-{row.uuid[:8]}/{name}")
        entry.size, entry.mtime = size, int(row.created_at or 0)
        return entry.tobuf(tarfile.PAX_FORMAT)

    def parts(name: str, size: int, content: Iterator[bytes]) -> Iterator[bytes]:
        yield header(name, size)
        read = 0
        for piece in content:
            read += len(piece)
            yield piece
        if read != size:  # the connection is then closed before the announced size
            raise StorageError(f"checkpoint {row.uuid}: {name} has changed during the download")
        yield bytes(-size % tarfile.BLOCKSIZE)

    sizes = dict(sorted(stored.resources.items()))
    files = [
        parts(name, size, store.pieces(row.uuid, name, 0, size)) for name, size in sizes.items()
    ]
    files.append(parts("checkpoint.json", len(description), iter([description])))
    sizes["checkpoint.json"] = len(description)
    total = sum(
        len(header(name, size)) + size + -size % tarfile.BLOCKSIZE for name, size in sizes.items()
    )
    return total + len(_END), chain(chain.from_iterable(files), [_END])
