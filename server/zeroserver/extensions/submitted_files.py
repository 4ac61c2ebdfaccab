"""Routes of the submitted model directory and its configurations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import Query, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from zerolab.contract.secret_text import mask_values
from zerolab.contract.secrets import find_secrets, mask_secrets
from zerolab.errors import ConfigError, NotFoundError
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.api.common import FILE_ANSWER, IdPath
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.state import config_of
from zeroserver.services import Services, ServicesDep
from zeroserver.store.archives import ArchiveFiles, archive_path
from zeroserver.store.rows import ExperimentRow, TrialRow, find_row

__all__ = ["EngineAnswer", "EngineEntry", "ModelFile", "ModelFilePage", "SubmittedAnswer", "router"]

router = resource_router("/api/v1", "experiments")

ACCESS.update(
    {
        "GET /api/v1/experiments/{experiment_id}/submitted": VIEWER,
        "GET /api/v1/experiments/{experiment_id}/files": VIEWER,
        "GET /api/v1/experiments/{experiment_id}/file": VIEWER,
        "GET /api/v1/trials/{trial_id}/engine": VIEWER,
    }
)


class ModelFile(Resource, frozen=True):
    """File of a model directory."""

    path: str
    """Path inside the directory."""
    size_bytes: int
    """Size of the file."""


class ModelFilePage(Resource, frozen=True):
    """All files of a model directory, sorted by path."""

    files: list[ModelFile]
    next_after: None


class SubmittedAnswer(Resource, frozen=True):
    """Configuration of an experiment as submitted."""

    config: dict[str, Any]


class EngineEntry(Resource, frozen=True):
    """Value of the engine's configuration."""

    key: str
    """Dotted key."""
    value: Any
    """Value that the engine uses."""
    origin: str
    """`file`, `override`, `auto`, `default`, `derived` or `hint`, with an optional remark after a
    colon."""


class EngineAnswer(Resource, frozen=True):
    """Engine configuration of a trial."""

    file: str | None
    """Engine file in the model directory; null if the experiment contains the configuration."""
    entries: list[EngineEntry]
    """All keys that have an effect."""
    changes: list[str]
    """Replacements of deprecated or unsupported keys while the file was read."""
    problems: list[str]
    """Reasons for missing entries."""


@router.get("/experiments/{experiment_id}/submitted")
async def get_submitted(services: ServicesDep, experiment_id: IdPath) -> SubmittedAnswer:
    """Read the submitted configuration, without defaults and with masked secrets.

    A fork replaces unchanged masks with the secrets.
    """

    def read(connection: Connection) -> SubmittedAnswer:
        row = find_row(connection, ExperimentRow, experiment_id)
        return SubmittedAnswer(mask_secrets(msgspec.json.decode(row.raw_config)))

    return await services.read(read)


@router.get("/experiments/{experiment_id}/files")
async def list_files(services: ServicesDep, experiment_id: IdPath) -> ModelFilePage:
    """List the files of the model directory."""
    row = await services.read(lambda connection: find_row(connection, ExperimentRow, experiment_id))
    files = await _files(services, row)
    sizes = await run_in_threadpool(files.sizes)
    return ModelFilePage([ModelFile(*item) for item in sorted(sizes.items())], None)


@router.get("/experiments/{experiment_id}/file", response_class=Response, responses=FILE_ANSWER)
async def get_file(
    services: ServicesDep,
    experiment_id: IdPath,
    name: Annotated[str, Query(max_length=4096, description="Path inside the model directory.")],
) -> Response:
    """Download one file of the model directory."""
    row = await services.read(lambda connection: find_row(connection, ExperimentRow, experiment_id))
    files = await _files(services, row)
    content = await run_in_threadpool(files.read, name)
    if content is None:
        raise NotFoundError(f"experiment {experiment_id} has no file {name[:200]!r}")
    # The experiment file, with its secrets, is often in the model directory.
    secrets = find_secrets(msgspec.json.decode(row.raw_config))
    text = mask_values(content.decode(errors="surrogateescape"), secrets)
    content = text.encode(errors="surrogateescape")
    return Response(content, media_type="application/octet-stream")


async def _files(services: Services, row: ExperimentRow) -> ArchiveFiles:
    path = archive_path(services.orchestrator.home.archives, row.archive)
    return ArchiveFiles(await run_in_threadpool(path.read_bytes))


@router.get("/trials/{trial_id}/engine", tags=["trials"])
async def get_engine(services: ServicesDep, trial_id: IdPath) -> EngineAnswer:
    """Read the engine configuration of a trial: every value and its origin."""
    trial = await services.read(lambda connection: find_row(connection, TrialRow, trial_id))
    home = trial.experiment_id
    row = await services.read(lambda connection: find_row(connection, ExperimentRow, home))
    path = archive_path(services.orchestrator.home.archives, row.archive)
    return await run_in_threadpool(_engine_of, row, trial, path)


def _engine_of(row: ExperimentRow, trial: TrialRow, path: Path) -> EngineAnswer:
    # Imported here, since they load the engine's configuration, which startup does not need.
    from zerolab.config.engine.resolved_config import resolve
    from zerolab.config.validation import engine_files

    config = config_of(row)
    hparams: Mapping[str, Any] = msgspec.json.decode(trial.hparams)
    length = config.searcher.full_length
    result = next(
        engine_files(
            hparams,
            ArchiveFiles(path.read_bytes()),
            length.batches if length is not None else None,
        ),
        None,
    )
    if result is None:
        return EngineAnswer(None, [], [], ["hyperparameters.deepspeed_config: is not given"])
    name, file = result
    problems, entries = list(file.problems), []
    if file.config is not None and not problems:
        try:
            replicas = file.config.data_parallel_size(config.resources.slots_per_trial)
            entries = [EngineEntry(*item) for item in resolve(file.config, replicas)]
        except ConfigError as error:
            problems += error.problems
    return EngineAnswer(name or None, entries, list(file.changes), problems)
