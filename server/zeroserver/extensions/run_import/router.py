"""Route that imports a run."""

from typing import Annotated

import msgspec
from fastapi import Path, Query, Request, Response
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from zerolab.errors import NotFoundError
from zeroserver.access.principal import principal_of
from zeroserver.access.routes import ACCESS, MEMBER, own
from zeroserver.api.common import IdPath
from zeroserver.api.experiments import experiment_answer
from zeroserver.api.resources import ExperimentAnswer
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.state import owner_of, stored_address
from zeroserver.services import ServicesDep, services_of
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import media, trials

__all__ = ["router"]

router = resource_router("/api/v1", "experiments")

ACCESS.update(
    {
        "POST /api/v1/import": MEMBER,
        "PUT /api/v1/import/{experiment_id}/media/{digest}": own("experiment"),
    }
)

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the content.")]

_METRICS_FILE = {
    "requestBody": {
        "required": True,
        "description": "A metrics file: a header, then one record a line.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


@router.post("/import", status_code=201, openapi_extra=_METRICS_FILE)
async def import_metrics(
    request: Request,
    project: Annotated[
        str | None, Query(max_length=64, description="Default: that of its configuration.")
    ] = None,
) -> ExperimentAnswer:
    """Import the metrics file of a run without a server as an ended experiment."""
    # Imported here, since it loads the client's HTTP library, which startup does not need.
    from zeroserver.extensions.run_import.service import import_run, parse

    services, content = services_of(request), await request.body()
    log = await run_in_threadpool(parse, content)
    user_id = principal_of(request).user_id
    experiment_id = await import_run(services.write, log, user_id, project)
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )


@router.put("/import/{experiment_id}/media/{digest}", status_code=204)
async def import_medium(
    services: ServicesDep, experiment_id: IdPath, digest: Digest, request: Request
) -> Response:
    """Store the content of a medium that an imported run has in its metrics file; repeatable."""
    from zerolab.storage.media import MediaStore

    def read(connection: Connection) -> tuple[ExperimentRow, int]:
        experiment = find_row(connection, ExperimentRow, experiment_id)
        query = (
            select(trials.c.id)
            .join(media, media.c.trial_id == trials.c.id)
            .where(trials.c.experiment_id == experiment_id, media.c.digest == digest)
        )
        trial_id = connection.execute(query).scalar()
        if trial_id is None or "imported" not in msgspec.json.decode(experiment.config):
            raise NotFoundError(f"experiment {experiment_id} has no imported medium {digest[:12]}")
        return experiment, int(trial_id)

    experiment, trial_id = await services.read(read)
    content, home = await request.body(), services.orchestrator.home
    owner = owner_of(services.orchestrator, trial_id)
    store = MediaStore(stored_address(home, experiment), owner)
    await run_in_threadpool(store.put_content, content, digest, home.path)
    return Response(status_code=204)
