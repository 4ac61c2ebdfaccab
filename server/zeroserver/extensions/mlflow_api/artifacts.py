"""Artifacts of MLflow's runs: files in the checkpoint storage, as media of the trial.

Routes of MLflow's artifact proxy, whose paths begin with the id of the run.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from zerolab.contract.media import CONTENT_TYPES, MAX_MEDIA_BYTES, MediaRecord, media_name_problem
from zerolab.contract.names import file_name_problem
from zerolab.errors import ConfigError, NotFoundError
from zerolab.formatting import size_text
from zeroserver.access.principal import principal_of
from zeroserver.access.routes import ACCESS, Access, Caller
from zeroserver.extensions.mlflow_api.activity import LastRequests
from zeroserver.extensions.mlflow_api.mapping import MlflowRun, find_run
from zeroserver.extensions.mlflow_api.requests import ARTIFACTS, Call
from zeroserver.orchestrator.ingest.media_service import MediaService
from zeroserver.orchestrator.state import owner_of, stored_address
from zeroserver.services import Services, services_of
from zeroserver.store.rows import ExperimentRow, MediaRow, find_row, read_rows
from zeroserver.store.schema import media

__all__ = ["add_artifact_routes", "artifact_files"]

_CALLERS = frozenset[Caller]({"user"})
_AUDIO = {".wav", ".mp3", ".ogg", ".flac"}


def add_artifact_routes(router: APIRouter) -> None:
    """Add the routes, and declare who may call them."""
    path = f"{ARTIFACTS}/{{path:path}}"
    for route, function, role in (
        (ARTIFACTS, list_proxied, "viewer"),
        (path, get_artifact, "viewer"),
        (path, put_artifact, "member"),
    ):
        method = "PUT" if function is put_artifact else "GET"
        ACCESS[f"{method} {route}"] = Access(_CALLERS, role, audited=False)  # type: ignore[arg-type]
        router.add_api_route(route, function, methods=[method], include_in_schema=False)


async def artifact_files(
    services: Services, run: MlflowRun, folder: str, *, relative: bool
) -> list[dict[str, Any]]:
    """Return the files and folders directly in a folder of a run.

    Args:
        services: Services of the server.
        run: The run.
        folder: Path of the folder, without slashes at its ends; empty for all of the run. The path
            of a file returns nothing.
        relative: Whether the paths of the result are relative to the folder.

    Raises:
        ConfigError: If the path is invalid.
    """
    if folder and (problem := file_name_problem(folder)):
        raise ConfigError("request", [f"path: {problem}"])
    prefix = f"{folder}/" if folder else ""

    def read(connection: Connection) -> dict[str, int | None]:
        columns = media.c
        query = select(columns.name, columns.size).where(
            columns.trial_id == run.trial_id, columns.name.startswith(prefix, autoescape=True)
        )
        entries: dict[str, int | None] = {}
        for name, size in connection.execute(query.order_by(columns.name)):
            entry, slash, _ = name.removeprefix(prefix).partition("/")
            entries[entry] = None if slash else int(size)
        return entries

    entries = await services.read(read)
    start = "" if relative else prefix
    return [
        {"path": f"{start}{entry}", "is_dir": True}
        if size is None
        else {"path": f"{start}{entry}", "is_dir": False, "file_size": size}
        for entry, size in entries.items()
    ]


async def list_proxied(request: Request) -> Response:
    """List the files of a folder; ``path`` is the id of a run and the folder."""
    services = services_of(request)
    path = request.query_params.get("path", "").strip("/")
    run, folder = await _split(services, path, to_file=False)
    return JSONResponse({"files": await artifact_files(services, run, folder, relative=True)})


async def _split(services: Services, path: str, *, to_file: bool = True) -> tuple[MlflowRun, str]:
    """Return the run and the path inside its artifacts.

    Raises:
        ConfigError: If the path is invalid.
        NotFoundError: If there is no such run.
    """
    if problem := file_name_problem(path):
        raise ConfigError("request", [f"path: {problem}"])
    run_uuid, _, name = path.partition("/")
    if to_file and not name:
        raise ConfigError("request", [f"path: must be RUN_ID/FILE, got {path[:100]!r}"])
    return await services.read(lambda connection: find_run(connection, run_uuid)), name


async def put_artifact(request: Request, path: str) -> Response:
    """Store a file; it replaces one of the same path."""
    services = services_of(request)
    run, name = await _split(services, path)
    await Call(services, principal_of(request), {}).check_owner(run.owner_id, f"run {run.uuid}")
    if problem := media_name_problem(name):
        raise ConfigError("request", [f"path: {problem}"])
    if run.status == "RUNNING":
        services.part(LastRequests).times[run.run_id] = services.orchestrator.steady()
    file = Path(tempfile.mkstemp(dir=services.orchestrator.home.path, prefix="media-")[1])
    try:
        digest, size = hashlib.sha256(), 0
        with file.open("wb") as stream:
            async for part in request.stream():
                digest.update(part)
                size += len(part)
                await run_in_threadpool(stream.write, part)
        record = _record(name, digest.hexdigest(), size, services.orchestrator.clock())
        experiment: ExperimentRow = await services.read(
            lambda connection: find_row(connection, ExperimentRow, run.experiment_id)
        )
        await run_in_threadpool(_store, services, run, experiment, file, record.digest)
    finally:
        file.unlink(missing_ok=True)

    def job(work: Any) -> None:
        MediaService(work).store(run.trial_id, [record])
        stored = work.raw(
            "SELECT 1 FROM media WHERE trial_id = ? AND name = ? AND digest = ?",
            (run.trial_id, name, record.digest),
        )
        if not stored:
            limits = f"20,000 and {size_text(MAX_MEDIA_BYTES)}"
            raise ConfigError("artifacts", [f"must be at most {limits} in a run"])
        work.touch("trial", run.experiment_id, run.trial_id)

    await services.write(job)
    return JSONResponse({})


def _record(name: str, digest: str, size: int, time: float) -> MediaRecord:
    suffix = PurePosixPath(name).suffix
    if not suffix[1:].isalnum() or not suffix.isascii() or len(suffix) > 17:
        suffix = ""
    is_shown = suffix.lower() in CONTENT_TYPES
    kind: Any = "file"
    if is_shown:
        kind = "audio" if suffix.lower() in _AUDIO else "image"
    metadata = {"file": PurePosixPath(name).name}
    return MediaRecord(name, 0, kind, digest, size, time, 0, suffix, metadata)


def _store(
    services: Services, run: MlflowRun, experiment: ExperimentRow, file: Path, digest: str
) -> None:
    from zerolab.storage.media import MediaStore

    address = stored_address(services.orchestrator.home, experiment)
    MediaStore(address, owner_of(services.orchestrator, run.trial_id)).put(file, digest)


async def get_artifact(request: Request, path: str) -> Response:
    """Download a file, always as an attachment."""
    services = services_of(request)
    run, name = await _split(services, path)

    def read(connection: Connection) -> tuple[MediaRow, ExperimentRow]:
        query = select(media).where(media.c.trial_id == run.trial_id, media.c.name == name)
        rows = read_rows(connection, MediaRow, query.order_by(media.c.step.desc()).limit(1))
        if not rows:
            raise NotFoundError(f"run {run.uuid} has no artifact {name[:200]!r}")
        return rows[0], find_row(connection, ExperimentRow, run.experiment_id)

    row, experiment = await services.read(read)
    pieces = await run_in_threadpool(_pieces, services, row, experiment)
    headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _pieces(services: Services, row: MediaRow, experiment: ExperimentRow) -> Iterator[bytes]:
    from zerolab.storage.media import MediaStore

    if not row.digest:
        return iter([msgspec.json.encode(msgspec.json.decode(row.metadata))])
    address = stored_address(services.orchestrator.home, experiment)
    store = MediaStore(address, owner_of(services.orchestrator, row.trial_id))
    pieces = store.pieces(row.digest, row.size)
    # Read the first piece now: a failure can still become an error response.
    return chain([next(pieces, b"")], pieces)
