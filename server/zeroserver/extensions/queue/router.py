"""Routes of the queue: jobs, resource pools and quotas."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import Connection

from zerolab.errors import NotFoundError
from zerolab.scheduler import Policy
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, ADMIN, MEMBER, VIEWER, own
from zeroserver.api.cluster.cluster_queries import pool_list
from zeroserver.api.common import IdPath, Limit, PlainText
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.queue.queries import job_list, quota_list
from zeroserver.extensions.queue.quota_requests import QuotaRequestService, request_list
from zeroserver.extensions.queue.resources import (
    JobAnswer,
    JobPage,
    PoolAnswer,
    PoolPage,
    QuotaAnswer,
    QuotaPage,
    QuotaRequestAnswer,
    QuotaRequestPage,
)
from zeroserver.extensions.queue.service import JobChange, QueueService
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep

__all__ = ["router"]

router = resource_router("/api/v1", "queue")

ACCESS.update(
    {
        "GET /api/v1/jobs": VIEWER,
        "PATCH /api/v1/jobs/{experiment_id}": own("experiment"),
        "POST /api/v1/jobs/{experiment_id}/move": own("experiment"),
        "GET /api/v1/pools": VIEWER,
        "PUT /api/v1/pools/{name}": ADMIN,
        "GET /api/v1/quotas": VIEWER,
        "PUT /api/v1/quotas/{kind}/{name:path}": ADMIN,
        "DELETE /api/v1/quotas/{kind}/{name:path}": ADMIN,
        "GET /api/v1/quota-requests": VIEWER,
        "POST /api/v1/quota-requests": MEMBER,
        "POST /api/v1/quota-requests/{request_id}/approve": ADMIN,
        "POST /api/v1/quota-requests/{request_id}/decline": ADMIN,
    }
)

Name = Annotated[str, Path(min_length=1, max_length=255)]


@router.get("/jobs")
async def list_jobs(
    services: ServicesDep,
    pool: Annotated[str | None, Query(max_length=64, description="Only of this pool.")] = None,
) -> JobPage:
    """List the experiments that have not ended, by pool, in the order of the queue."""

    def read(connection: Connection) -> JobPage:
        items = job_list(services.orchestrator, connection)
        return JobPage(jobs=[job for job in items if pool in {None, job.pool}])

    return await services.read(read)


async def _job(services: Services, experiment_id: int) -> JobAnswer:
    items = await services.read(lambda connection: job_list(services.orchestrator, connection))
    for job in items:
        if job.experiment_id == experiment_id:
            return JobAnswer(job)
    msg = f"experiment {experiment_id} has ended"
    raise NotFoundError(msg)


async def _write(services: Services, job: Callable[[UnitOfWork], None]) -> None:
    """Run a job of the writer, then schedule."""

    def both(work: UnitOfWork) -> None:
        job(work)
        work.scheduling.schedule()

    await services.write(both)


class JobPatch(BaseModel):
    """Changes of a job; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    priority: Annotated[int, Field(ge=1, le=99, strict=True)] | None = None
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] | None = None
    max_slots: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    """``null`` removes the limit."""


@router.patch("/jobs/{experiment_id}")
async def patch_job(
    services: ServicesDep, principal: PrincipalDep, experiment_id: IdPath, patch: JobPatch
) -> JobAnswer:
    """Change a job's priority, weight or maximum of slots; running trials continue."""
    unlimited = "max_slots" in patch.model_fields_set and patch.max_slots is None
    change = JobChange(patch.priority, patch.weight, patch.max_slots, unlimited)
    limited = not principal.is_admin
    await _write(
        services, lambda work: QueueService(work).change(experiment_id, change, limited=limited)
    )
    return await _job(services, experiment_id)


class Move(BaseModel):
    """Target of a move; exactly one field must be set."""

    model_config = ConfigDict(extra="forbid")

    ahead_of: Annotated[int, Field(ge=1, le=2**53, strict=True)] | None = None
    behind: Annotated[int, Field(ge=1, le=2**53, strict=True)] | None = None

    @model_validator(mode="after")
    def _one(self) -> "Move":
        if (self.ahead_of is None) == (self.behind is None):
            msg = "name one of ahead_of and behind: the id of another experiment"
            raise ValueError(msg)
        return self


@router.post("/jobs/{experiment_id}/move")
async def move_job(
    services: ServicesDep, principal: PrincipalDep, experiment_id: IdPath, move: Move
) -> JobAnswer:
    """Move a job directly ahead of or behind another one of its pool, with the same priority."""
    anchor = move.ahead_of or move.behind or 0
    side: Literal["ahead", "behind"] = "ahead" if move.ahead_of is not None else "behind"
    limited = not principal.is_admin
    await _write(
        services,
        lambda work: QueueService(work).move(experiment_id, anchor, side, limited=limited),
    )
    return await _job(services, experiment_id)


@router.get("/pools")
async def list_pools(services: ServicesDep) -> PoolPage:
    """List the resource pools, their slots and their policies."""
    return await services.read(
        lambda connection: PoolPage(pools=pool_list(services.orchestrator, connection))
    )


class PoolPut(BaseModel):
    """Settings of a pool."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy


@router.put("/pools/{name}")
async def put_pool(services: ServicesDep, name: Name, body: PoolPut) -> PoolAnswer:
    """Set the order in which jobs of a pool start; it may have no agents yet."""
    await _write(services, lambda work: QueueService(work).set_policy(name, body.policy))
    items = await services.read(lambda connection: pool_list(services.orchestrator, connection))
    return PoolAnswer(next(pool for pool in items if pool.name == name))


@router.get("/quotas")
async def list_quotas(services: ServicesDep) -> QuotaPage:
    """List the quotas and their slots in use."""
    users = services.orchestrator.users
    projects = {f"project:{project.name}" for project in services.orchestrator.projects.projects()}

    def read(connection: Connection) -> QuotaPage:
        return QuotaPage(
            quotas=[
                quota
                for quota in quota_list(connection, users)
                if quota.group in projects or not quota.group.startswith("project:")
            ]
        )

    return await services.read(read)


Kind = Literal["pool", "label", "user", "project"]


class QuotaPut(BaseModel):
    """Settings of a quota."""

    model_config = ConfigDict(extra="forbid")

    max_slots: Annotated[int, Field(ge=0, lt=2**31, strict=True)]
    request_limit: Annotated[int, Field(ge=0, lt=2**31, strict=True)] | None = None
    """With ``user/*``: maximum number of slots that a user may request."""


@router.put("/quotas/{kind}/{name:path}")
async def put_quota(services: ServicesDep, kind: Kind, name: Name, body: QuotaPut) -> QuotaAnswer:
    """Limit the slots of all jobs of a pool, label, user or project; ``user/*``: of each user."""
    await _write(
        services,
        lambda work: QueueService(work).set_quota(kind, name, body.max_slots, body.request_limit),
    )
    users = services.orchestrator.users
    items = await services.read(lambda connection: quota_list(connection, users))
    return QuotaAnswer(next(quota for quota in items if quota.group == f"{kind}:{name}"))


@router.delete("/quotas/{kind}/{name:path}", status_code=204)
async def delete_quota(services: ServicesDep, kind: Kind, name: Name) -> Response:
    """Remove a quota."""
    await _write(services, lambda work: QueueService(work).remove_quota(kind, name))
    return Response(status_code=204)


@router.get("/quota-requests")
async def list_quota_requests(
    services: ServicesDep,
    state: Annotated[
        Literal["OPEN", "APPROVED", "DECLINED"] | None, Query(description="Only in this state.")
    ] = None,
    limit: Limit = 100,
) -> QuotaRequestPage:
    """List the newest requests for larger quotas, newest first."""
    users = services.orchestrator.users
    return await services.read(
        lambda connection: QuotaRequestPage(
            requests=request_list(connection, users, state=state, limit=limit)
        )
    )


class NewQuotaRequest(BaseModel):
    """Request for a larger quota."""

    model_config = ConfigDict(extra="forbid")

    max_slots: Annotated[int, Field(ge=1, lt=2**31, strict=True)]
    reason: Annotated[PlainText, Field(min_length=1, max_length=1000)]


async def _request(services: Services, request_id: int) -> QuotaRequestAnswer:
    users = services.orchestrator.users
    (request,) = await services.read(
        lambda connection: request_list(connection, users, request_id=request_id)
    )
    return QuotaRequestAnswer(request)


@router.post("/quota-requests", status_code=201)
async def create_quota_request(
    services: ServicesDep, principal: PrincipalDep, body: NewQuotaRequest
) -> QuotaRequestAnswer:
    """Request a larger quota for the caller; it replaces the caller's open request."""
    request_id = await services.write(
        lambda work: QuotaRequestService(work).create(
            principal.user_id, body.max_slots, body.reason
        )
    )
    return await _request(services, request_id)


class QuotaDecision(BaseModel):
    """Decision about a request."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[PlainText, Field(max_length=1000)] = ""


@router.post("/quota-requests/{request_id}/approve")
async def approve_quota_request(
    services: ServicesDep, principal: PrincipalDep, request_id: IdPath, body: QuotaDecision
) -> QuotaRequestAnswer:
    """Approve a request: its user has the requested quota from now on."""
    await _write(
        services,
        lambda work: QuotaRequestService(work).decide(
            request_id, principal.user_id, body.reason, approved=True
        ),
    )
    return await _request(services, request_id)


@router.post("/quota-requests/{request_id}/decline")
async def decline_quota_request(
    services: ServicesDep, principal: PrincipalDep, request_id: IdPath, body: QuotaDecision
) -> QuotaRequestAnswer:
    """Decline a request; the quota stays as it is."""
    await services.write(
        lambda work: QuotaRequestService(work).decide(
            request_id, principal.user_id, body.reason, approved=False
        )
    )
    return await _request(services, request_id)
