"""Routes that remove checkpoints or their files, or change a retention policy."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, own
from zeroserver.api.common import IdPath, Name
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.checkpoint_removal.resources import Removal, RemovedCheckpoint
from zeroserver.extensions.checkpoint_removal.service import (
    CheckpointRemovalService,
    Going,
    batched,
    checkpoints_to_remove,
    removed,
    unkept,
)
from zeroserver.orchestrator.checkpoints.checkpoint_service import AT_ONCE
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import ServicesDep

__all__ = ["router"]

router = resource_router("/api/v1", "checkpoints")

ACCESS.update(
    {
        "POST /api/v1/checkpoints/remove": MEMBER,
        "DELETE /api/v1/checkpoints/{uuid}": own("checkpoint"),
        "POST /api/v1/experiments/{experiment_id}/gc": own("experiment"),
    }
)


class Removing(BaseModel):
    """Checkpoints to remove, or files of them."""

    model_config = ConfigDict(extra="forbid")

    uuids: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    """Uuids of the checkpoints. If one is still needed, none is removed."""
    globs: Annotated[list[Name], Field(max_length=100)] = Field(default_factory=list)
    """Patterns of paths, such as `model0/*.pt`; `*` also matches slashes. Empty for all files."""
    dry_run: bool = False
    """Only return what would be removed."""


class Policy(BaseModel):
    """Retention policy of an experiment; omitted keys stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    save_experiment_best: Annotated[int, Field(ge=0, le=2**31)] | None = None
    save_trial_best: Annotated[int, Field(ge=0, le=2**31)] | None = None
    save_trial_latest: Annotated[int, Field(ge=0, le=2**31)] | None = None
    dry_run: bool = False
    """Only return what would be removed; the policy does not change."""


def _removal(going: Sequence[Going], *, dry_run: bool) -> Removal:
    entries = [
        RemovedCheckpoint(
            one.row.uuid, one.row.trial_id, one.row.steps_completed, one.whole, one.files, one.size
        )
        for one in going
    ]
    return Removal(dry_run, entries, sum(entry.size_bytes for entry in entries))


def _remove_some(
    work: UnitOfWork,
    uuids: Sequence[str],
    globs: Sequence[str],
    removed: int,
) -> list[Going]:
    return CheckpointRemovalService(work).remove(uuids, globs, removed=removed)


@router.post("/checkpoints/remove")
async def remove(services: ServicesDep, principal: PrincipalDep, body: Removing) -> Removal:
    """Remove checkpoints, or files of them; 409 if something still needs them."""
    if not body.dry_run:
        await services.ownership.require(principal, "checkpoint", *body.uuids)
    going = await services.read(
        lambda connection: checkpoints_to_remove(connection, body.uuids, body.globs)
    )
    if not body.dry_run:
        uuids = [removal.row.uuid for removal in going]
        going = []
        for some in batched(uuids, AT_ONCE):
            going += await services.write(
                partial(_remove_some, uuids=some, globs=body.globs, removed=len(going))
            )
    return _removal(going, dry_run=body.dry_run)


@router.delete("/checkpoints/{uuid}", status_code=204)
async def delete_checkpoint(services: ServicesDep, uuid: str) -> Response:
    """Remove a checkpoint; idempotent."""
    await services.write(lambda work: CheckpointRemovalService(work).remove([uuid]))
    return Response(status_code=204)


@router.post("/experiments/{experiment_id}/gc")
async def collect_checkpoints(
    services: ServicesDep, experiment_id: IdPath, policy: Policy | None = None
) -> Removal:
    """Set an experiment's retention policy, and prune its checkpoints."""
    chosen = policy or Policy()
    counts = chosen.model_dump(exclude={"dry_run"}, exclude_none=True)
    if chosen.dry_run:
        going = await services.read(lambda connection: unkept(connection, experiment_id, counts))
    else:
        await services.write(
            lambda work: CheckpointRemovalService(work).set_policy(experiment_id, counts)
        )
        uuids = await services.apply_policy(experiment_id)
        going = await services.read(lambda connection: removed(connection, uuids))
    return _removal(going, dry_run=chosen.dry_run)
