"""Routes of projects."""

from typing import Annotated, Any

from fastapi import Path, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, case, func, select

from zerolab.contract.names import check_project
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, VIEWER, own
from zeroserver.api.common import PlainText
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.projects.resources import (
    Project,
    ProjectAnswer,
    ProjectMember,
    ProjectMembers,
    ProjectPage,
)
from zeroserver.extensions.projects.service import ProjectService, missing_project
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.schema import experiments, models

__all__ = ["router"]

router = resource_router("/api/v1/projects", "projects")

ACCESS.update(
    {
        "GET /api/v1/projects": VIEWER,
        "POST /api/v1/projects": MEMBER,
        "GET /api/v1/projects/{project}": VIEWER,
        "PATCH /api/v1/projects/{project}": own("project"),
        "GET /api/v1/projects/{project}/members": VIEWER,
        "PUT /api/v1/projects/{project}/members/{user}": own("project"),
        "DELETE /api/v1/projects/{project}/members/{user}": own("project"),
    }
)

ProjectName = Annotated[str, Path(max_length=64)]


def _read(connection: Connection, services: Services) -> list[Project]:
    """Return all projects, sorted by name, with the numbers of their experiments and models."""
    columns = experiments.c
    open_count = func.sum(case((columns.state.in_(EXPERIMENT_ENDED), 0), else_=1))
    query = select(
        columns.project_id, func.count(), open_count, func.max(columns.created_at)
    ).group_by(columns.project_id)
    totals = {key: values for key, *values in connection.execute(query)}
    query = select(models.c.project_id, func.count().label("count")).group_by(models.c.project_id)
    model_counts = {row.project_id: row.count for row in connection.execute(query)}
    orchestrator = services.orchestrator
    result = []
    for row in orchestrator.projects.projects():
        count, unfinished, last = totals.get(row.id, (0, 0, None))
        result.append(
            Project.of(
                row,
                owner=orchestrator.users.shown_owner(row.owner_id),
                experiments=count,
                unfinished=int(unfinished),
                models=model_counts.get(row.id, 0),
                last_experiment_at=iso(last),
            )
        )
    return result


async def _one(services: Services, name: str) -> ProjectAnswer:
    for project in await services.read(lambda connection: _read(connection, services)):
        if project.name == name:
            return ProjectAnswer(project)
    raise missing_project(name)


@router.get("")
async def list_projects(services: ServicesDep) -> ProjectPage:
    """List the projects, sorted by name."""
    return await services.read(lambda connection: ProjectPage(_read(connection, services)))


class NewProject(BaseModel):
    """New project."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, AfterValidator(check_project)]
    """1 to 64 letters, digits, ``.``, ``_`` or ``-``, starting with a letter or digit."""
    description: Annotated[PlainText, Field(max_length=10_000)] = ""


@router.post("", status_code=201)
async def create_project(
    services: ServicesDep, principal: PrincipalDep, body: NewProject
) -> ProjectAnswer:
    """Create a project."""
    await services.write(
        lambda work: ProjectService(work).create(body.name, body.description, principal.user_id)
    )
    return await _one(services, body.name)


@router.get("/{project}")
async def get_project(services: ServicesDep, project: ProjectName) -> ProjectAnswer:
    """Read one project."""
    return await _one(services, project)


class ProjectPatch(BaseModel):
    """Changes of a project; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    description: Annotated[PlainText, Field(max_length=10_000)] | None = None
    notes: Annotated[PlainText, Field(max_length=1_000_000)] | None = None
    archived: Annotated[bool, Field(strict=True)] | None = None
    """True: the project accepts no new experiments and models; the existing ones continue."""
    restricted: Annotated[bool, Field(strict=True)] | None = None
    """True: only the owner, members and administrators see the project and what belongs to it."""


@router.patch("/{project}")
async def patch_project(
    services: ServicesDep, project: ProjectName, patch: ProjectPatch
) -> ProjectAnswer:
    """Change a project's description or notes, archive it, or restrict it to its members."""
    values: dict[str, Any] = patch.model_dump(exclude_none=True)
    values |= {key: int(value) for key, value in values.items() if isinstance(value, bool)}
    await services.write(lambda work: ProjectService(work).change(project, values))
    return await _one(services, project)


@router.get("/{project}/members")
async def list_members(services: ServicesDep, project: ProjectName) -> ProjectMembers:
    """List the users who see the project if it is restricted, besides administrators."""
    directory, users = services.orchestrator.projects, services.orchestrator.users
    row = directory.find(project)
    if row is None:
        raise missing_project(project)
    names = {users.name_of(user_id): user_id for user_id in directory.members_of(row)}
    members = [ProjectMember(name, names[name] == row.owner_id) for name in sorted(names)]
    return ProjectMembers(members)


UserName = Annotated[str, Path(max_length=255)]


@router.put("/{project}/members/{user}", status_code=204)
async def add_member(services: ServicesDep, project: ProjectName, user: UserName) -> Response:
    """Add a member; no effect if the user is one."""
    await services.write(lambda work: ProjectService(work).add_member(project, user))
    return Response(status_code=204)


@router.delete("/{project}/members/{user}", status_code=204)
async def remove_member(services: ServicesDep, project: ProjectName, user: UserName) -> Response:
    """Remove a member, who no longer sees the project if it is restricted."""
    await services.write(lambda work: ProjectService(work).remove_member(project, user))
    return Response(status_code=204)
