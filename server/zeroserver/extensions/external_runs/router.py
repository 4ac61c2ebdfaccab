"""Routes of external runs: open, hyperparameters, media, heartbeat and end."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, RUN
from zeroserver.api.common import IdPath, Name, PlainText
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.external_runs.service import (
    ExternalRunService,
    OpenedRun,
    archive_content,
    check_external,
    raw_config,
)
from zeroserver.extensions.external_runs.supervisor import Heartbeats
from zeroserver.orchestrator.experiment_service import Submission
from zeroserver.orchestrator.search.search_service import NewSearch
from zeroserver.orchestrator.state import owner_of, stored_address
from zeroserver.services import Services, ServicesDep
from zeroserver.store.archives import store_archive
from zeroserver.store.rows import ExperimentRow, RunRow, find_row

__all__ = ["open_run", "router"]

router = resource_router("/api/v1/external-runs", "external runs")

ACCESS.update(
    {
        "POST /api/v1/external-runs": MEMBER,
        "POST /api/v1/external-runs/{run_id}/hparams": RUN,
        "POST /api/v1/external-runs/{run_id}/heartbeat": RUN,
        "PUT /api/v1/external-runs/{run_id}/media/{digest}": RUN,
        "POST /api/v1/external-runs/{run_id}/end": RUN,
    }
)

Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the content.")]


class NewRun(BaseModel):
    """External run to open."""

    model_config = ConfigDict(extra="forbid")

    id: Key
    """Id that the reporting program chooses, unique for its user."""
    session: Key
    """Id of the process; the same when its reports are sent later."""
    name: Name = "external"
    description: PlainText = ""
    labels: list[Annotated[str, Field(min_length=1)]] = []
    project: Annotated[str, Field(max_length=255)] = ""
    """Project of a new experiment; empty for the default project."""
    create_project: bool = False
    """Whether to create the project if it is missing."""
    hparams: dict[str, Any] = {}
    """Hyperparameters of a new experiment; empty keeps those of an existing one."""
    replace: bool = False
    """Whether to take over from a process that reports under the same id."""


class Hparams(BaseModel):
    """Hyperparameters of an external run."""

    model_config = ConfigDict(extra="forbid")

    hparams: dict[str, Any]


class RunEnd(BaseModel):
    """End of an external run."""

    model_config = ConfigDict(extra="forbid")

    error: Annotated[str | None, Field(max_length=2000)] = None
    """Why it failed; null if it completed."""


class ExternalRun(Resource, frozen=True):
    """Run that accepts reports."""

    experiment_id: int
    trial_id: int
    run_id: int
    steps_completed: int
    """Last step of the trial; 0 for a new one."""
    token: str
    """Token for the routes of this run, valid until it ends."""


@router.post("", status_code=201)
async def open_external_run(
    services: ServicesDep, principal: PrincipalDep, body: NewRun
) -> ExternalRun:
    """Open a run of a program that no agent starts; repeatable.

    The first run of an id creates an experiment. Reports, log lines and directives use the routes
    of all runs, with the token of the response.
    """
    return await open_run(services, body, principal.user_id)


async def open_run(
    services: Services,
    body: NewRun,
    owner_id: int,
    also: Callable[[Any, OpenedRun], None] = lambda _work, _run: None,
) -> ExternalRun:
    """Open an external run; for other extensions, too.

    Args:
        services: Services of the server.
        body: The run.
        owner_id: User to whom it belongs.
        also: Job for the same transaction.

    Raises:
        ConfigError: If the name, the description or a label is invalid.
        ConflictError: If another process reports under the same id.
    """
    submission = await run_in_threadpool(_submission, services, body, owner_id)

    def job(work: Any) -> Any:
        service = ExternalRunService(work)
        run = service.open(
            submission,
            body.id,
            body.session,
            replace=body.replace,
            create_project=body.create_project,
        )
        if body.hparams:
            service.set_hparams(run.run_id, body.hparams)
        also(work, run)
        return run

    run = await services.write(job)
    token = services.keys.run_token(run.run_id)
    return ExternalRun(run.experiment_id, run.trial_id, run.run_id, run.steps_completed, token)


def _submission(services: Services, body: NewRun, owner_id: int) -> Submission:
    # Imported here, since it loads the configuration of experiments, which startup does not need.
    from zerolab.config.validation import check_experiment
    from zeroserver.store.archives import reader

    content = archive_content()
    raw = raw_config(body.id, body.name, body.description, body.labels, body.project)
    checked = check_experiment(raw, reader(content))
    return Submission(
        config=checked,
        prepared_search=[NewSearch.of(checked, 0)],
        raw_config=raw,
        archive=store_archive(services.orchestrator.home.archives, content),
        seed=0,
        owner_id=owner_id,
        activate=False,
    )


@router.post("/{run_id}/hparams", status_code=204)
async def set_external_hparams(services: ServicesDep, run_id: IdPath, body: Hparams) -> Response:
    """Replace the hyperparameters of an external run; secrets are masked."""
    await services.write(lambda work: ExternalRunService(work).set_hparams(run_id, body.hparams))
    return Response(status_code=204)


@router.post("/{run_id}/heartbeat", status_code=204)
async def keep_external_run(services: ServicesDep, run_id: IdPath) -> Response:
    """Keep a run that reports nothing at the moment from being considered lost."""
    run: RunRow = await services.read(lambda connection: find_row(connection, RunRow, run_id))
    check_external(run)
    services.part(Heartbeats).add(run_id)
    return Response(status_code=204)


@router.put("/{run_id}/media/{digest}", status_code=204)
async def put_external_media(
    services: ServicesDep, run_id: IdPath, digest: Digest, request: Request
) -> Response:
    """Store the content of a medium in the checkpoint storage; its record is a report."""

    def read(connection: Connection) -> tuple[RunRow, ExperimentRow]:
        run = find_row(connection, RunRow, run_id)
        check_external(run)
        return run, find_row(connection, ExperimentRow, run.experiment_id)

    run, experiment = await services.read(read)
    content = await request.body()
    await run_in_threadpool(_store, services, run, experiment, digest, content)
    return Response(status_code=204)


def _store(
    services: Services, run: RunRow, experiment: ExperimentRow, digest: str, content: bytes
) -> None:
    from zerolab.storage.media import MediaStore

    home = services.orchestrator.home
    owner = owner_of(services.orchestrator, run.trial_id)
    MediaStore(stored_address(home, experiment), owner).put_content(content, digest, home.path)


@router.post("/{run_id}/end", status_code=204)
async def end_external_run(services: ServicesDep, run_id: IdPath, body: RunEnd) -> Response:
    """End an external run, its trial and its experiment; repeatable."""
    await services.write(lambda work: ExternalRunService(work).end(run_id, body.error))
    return Response(status_code=204)
