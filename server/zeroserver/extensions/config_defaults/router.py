"""Routes of defaults and limits of experiments."""

from typing import Annotated, Any

import msgspec
from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import delete
from starlette.concurrency import run_in_threadpool

from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError, NotFoundError
from zeroserver.access.routes import ACCESS, ADMIN, VIEWER
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.config_defaults.resources import Defaults, DefaultsAnswer
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep
from zeroserver.store.config_defaults import INSTALLATION, ConfigDefaults, Limits
from zeroserver.store.schema import config_defaults

__all__ = ["router"]

router = resource_router("/api/v1/defaults", "defaults")

ACCESS.update(
    {
        "GET /api/v1/defaults": VIEWER,
        "PUT /api/v1/defaults": ADMIN,
        "DELETE /api/v1/defaults": ADMIN,
    }
)

ProjectName = Annotated[
    str | None, Query(max_length=64, description="Name of a project; omit it: the installation.")
]
_OF_EXPERIMENTS = ("name", "description", "project", "entrypoint", "hyperparameters", "searcher")
"""Keys that belong to one experiment."""


def _scope(services: Services, project: str | None) -> int:
    if project is None:
        return INSTALLATION
    row = services.orchestrator.projects.find(project)
    if row is None:
        raise NotFoundError(f"there is no project {project}; `zerolab project list` lists them")
    return row.id


@router.get("")
async def get_defaults(services: ServicesDep, project: ProjectName = None) -> DefaultsAnswer:
    """Read the defaults and limits of a project or of the installation."""
    defaults = services.orchestrator.defaults.get(_scope(services, project))
    if defaults is None:
        return DefaultsAnswer(Defaults(project, {}, Limits(), None))
    config = mask_secrets(defaults.config)
    return DefaultsAnswer(Defaults(project, config, defaults.limits, iso(defaults.updated_at)))


class LimitsPut(BaseModel):
    """Limits of experiments."""

    model_config = ConfigDict(extra="forbid")

    slots_per_trial: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    max_slots: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    priority: Annotated[int, Field(ge=1, le=99, strict=True)] | None = None
    storage_gb: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None


class DefaultsPut(BaseModel):
    """Defaults and limits that replace the previous ones."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] = Field(default_factory=dict)
    limits: LimitsPut = Field(default_factory=LimitsPut)


@router.put("")
async def put_defaults(
    services: ServicesDep, body: DefaultsPut, project: ProjectName = None
) -> DefaultsAnswer:
    """Set the defaults and limits of new experiments of a project or of the installation."""
    scope = _scope(services, project)
    await run_in_threadpool(_check, body.config)
    limits = Limits(**body.limits.model_dump())
    text = msgspec.json.encode({"config": body.config, "limits": limits}).decode()

    def job(work: UnitOfWork) -> None:
        defaults = ConfigDefaults(body.config, limits, work.clock())
        _remove(work, scope)
        row = {"scope": scope, "content": text, "updated_at": defaults.updated_at}
        work.connection.execute(config_defaults.insert().values(row))
        work.then.append(lambda: work.orchestrator.defaults.put(scope, defaults))

    await services.write(job)
    return await get_defaults(services, project)


@router.delete("", status_code=204)
async def delete_defaults(services: ServicesDep, project: ProjectName = None) -> Response:
    """Remove the defaults and limits of a project or of the installation."""
    scope = _scope(services, project)

    def job(work: UnitOfWork) -> None:
        _remove(work, scope)
        work.then.append(lambda: work.orchestrator.defaults.put(scope, None))

    await services.write(job)
    return Response(status_code=204)


def _remove(work: UnitOfWork, scope: int) -> None:
    work.connection.execute(delete(config_defaults).where(config_defaults.c.scope == scope))


def _check(config: dict[str, Any]) -> None:
    """Check defaults like an experiment that has nothing else.

    Raises:
        ConfigError: With all problems.
    """
    from zerolab.config.experiment.experiment_config import parse_experiment  # for startup
    from zerolab.schema.json_values import json_value_problems

    if problems := json_value_problems(config):
        raise ConfigError("defaults", problems)
    problems = [
        f"{key}: must not be in defaults, since it belongs to one experiment; remove it"
        for key in _OF_EXPERIMENTS
        if key in config
    ]
    others = {key: value for key, value in config.items() if key not in _OF_EXPERIMENTS}
    needed = {"entrypoint": "python train.py", "searcher": {"name": "single"}}
    problems += parse_experiment({**others, **needed}).problems
    if problems:
        raise ConfigError("defaults", problems)
