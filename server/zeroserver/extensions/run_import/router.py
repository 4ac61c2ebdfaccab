"""Route that imports a run."""

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from zeroserver.access.principal import principal_of
from zeroserver.access.routes import ACCESS, MEMBER
from zeroserver.api.experiments import experiment_answer
from zeroserver.api.resources import ExperimentAnswer
from zeroserver.api.strict_route import resource_router
from zeroserver.services import services_of

__all__ = ["router"]

router = resource_router("/api/v1", "experiments")

ACCESS["POST /api/v1/import"] = MEMBER

_METRICS_FILE = {
    "requestBody": {
        "required": True,
        "description": "A metrics file: a header, then one record a line.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


@router.post("/import", status_code=201, openapi_extra=_METRICS_FILE)
async def import_metrics(request: Request) -> ExperimentAnswer:
    """Import the metrics file of a run without a server as an ended experiment."""
    # Imported here, since it loads the client's HTTP library, which startup does not need.
    from zeroserver.extensions.run_import.service import import_run, parse

    services, content = services_of(request), await request.body()
    log = await run_in_threadpool(parse, content)
    experiment_id = await import_run(services.write, log, principal_of(request).user_id)
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )
