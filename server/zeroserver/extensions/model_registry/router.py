"""Routes of the model registry: names with checkpoints as versions."""

from collections import defaultdict
from typing import Annotated

from fastapi import Path, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from zerolab.contract.names import check_alias
from zerolab.errors import NotFoundError
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, VIEWER, own
from zeroserver.api.common import MAX_ID, IdPath, PlainText
from zeroserver.api.common import Name as TextName
from zeroserver.api.experiments import project_id
from zeroserver.api.queries import checkpoint_metrics
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.model_registry.resources import (
    Model,
    ModelAnswer,
    ModelPage,
    ModelVersion,
)
from zeroserver.extensions.model_registry.service import ModelRegistry
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ModelRow, read_rows
from zeroserver.store.schema import checkpoints, model_aliases, model_versions, models

__all__ = ["router"]

router = resource_router("/api/v1", "models")

ACCESS.update(
    {
        "GET /api/v1/models": VIEWER,
        "POST /api/v1/models": MEMBER,
        "GET /api/v1/models/{name}": VIEWER,
        "DELETE /api/v1/models/{name}": own("model"),
        "POST /api/v1/models/{name}/versions": own("model"),
        "DELETE /api/v1/models/{name}/versions/{version}": own("model"),
        "PUT /api/v1/models/{name}/versions/{version}/aliases": own("model"),
        "PUT /api/v1/models/{name}/aliases/{alias}": own("model"),
        "DELETE /api/v1/models/{name}/aliases/{alias}": own("model"),
    }
)

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, Path(max_length=128)]
Alias = Annotated[str, Path(max_length=64), AfterValidator(check_alias)]


def _read(
    connection: Connection,
    orchestrator: Orchestrator,
    name: str | None = None,
    project: int | None = None,
) -> list[Model]:
    """Return all models sorted by name, or one, with their versions, oldest first."""
    columns = model_versions.c
    query = (
        select(
            columns.model_id, columns.version, columns.checkpoint, columns.notes,
            columns.created_at, checkpoints.c.experiment_id, checkpoints.c.trial_id,
            checkpoints.c.steps_completed, checkpoints.c.size_bytes,
        )
        .join(checkpoints, checkpoints.c.uuid == columns.checkpoint)
        .order_by(columns.model_id, columns.version)
    )  # fmt: skip
    alias_query = select(model_aliases).order_by(model_aliases.c.alias)
    model_query = select(models).order_by(models.c.name)
    if name is not None:
        model_query = model_query.where(models.c.name == name)
        ids = select(models.c.id).where(models.c.name == name)
        query = query.where(columns.model_id.in_(ids))
        alias_query = alias_query.where(model_aliases.c.model_id.in_(ids))
    if project is not None:
        model_query = model_query.where(models.c.project_id == project)
    aliases: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for alias in connection.execute(alias_query):
        aliases[alias.model_id, alias.version].append(alias.alias)
    versions: defaultdict[int, list[ModelVersion]] = defaultdict(list)
    rows = connection.execute(query).all()
    metrics = checkpoint_metrics(connection, [row.checkpoint for row in rows])
    for row in rows:
        version = ModelVersion.of(
            row,
            metrics=metrics.get(row.checkpoint),
            aliases=aliases[row.model_id, row.version],
        )
        versions[row.model_id].append(version)
    return [
        Model.of(
            row,
            owner=orchestrator.users.shown_owner(row.owner_id),
            project=orchestrator.projects.shown_name(row.project_id),
            versions=versions[row.id],
        )
        for row in read_rows(connection, ModelRow, model_query)
    ]


async def _one(services: Services, name: str) -> ModelAnswer:
    orchestrator = services.orchestrator
    models = await services.read(lambda connection: _read(connection, orchestrator, name))
    if not models:
        raise NotFoundError(f"there is no model {name}; `zerolab model list` shows them")
    return ModelAnswer(models[0])


@router.get("/models")
async def list_models(
    services: ServicesDep,
    project: Annotated[str | None, Query(max_length=64, description="Its project.")] = None,
) -> ModelPage:
    """List the models of the registry, with their versions."""
    orchestrator = services.orchestrator
    only = None if project is None else project_id(services, project)
    return await services.read(
        lambda connection: ModelPage(models=_read(connection, orchestrator, project=only))
    )


class NewModel(BaseModel):
    """New model."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=_NAME)]
    """1 to 128 letters, digits, ``.``, ``_`` or ``-``, starting with a letter or digit."""
    description: Annotated[PlainText, Field(max_length=10_000)] = ""
    project: Annotated[TextName, Field(max_length=64)] | None = None
    """Its project; ``default`` if it is not given."""


@router.post("/models", status_code=201)
async def create_model(
    services: ServicesDep, principal: PrincipalDep, body: NewModel
) -> ModelAnswer:
    """Add a model to the registry."""
    await services.write(
        lambda work: ModelRegistry(work).create(
            body.name, body.description, principal.user_id, body.project
        )
    )
    return await _one(services, body.name)


@router.get("/models/{name}")
async def get_model(services: ServicesDep, name: Name) -> ModelAnswer:
    """Read one model and its versions."""
    return await _one(services, name)


@router.delete("/models/{name}", status_code=204)
async def delete_model(services: ServicesDep, name: Name) -> Response:
    """Delete a model; its checkpoints follow the policies of their experiments."""
    await services.write(lambda work: ModelRegistry(work).remove(name))
    return Response(status_code=204)


class NewVersion(BaseModel):
    """Checkpoint to register as a version of a model."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Annotated[str, Field(max_length=64)]
    """Uuid of the checkpoint."""
    notes: Annotated[PlainText, Field(max_length=10_000)] = ""


@router.post("/models/{name}/versions", status_code=201)
async def register_version(services: ServicesDep, name: Name, body: NewVersion) -> ModelAnswer:
    """Register a checkpoint as the next version of a model; retention keeps it."""
    await services.write(
        lambda work: ModelRegistry(work).register(name, body.checkpoint, body.notes)
    )
    return await _one(services, name)


@router.delete("/models/{name}/versions/{version}", status_code=204)
async def delete_version(services: ServicesDep, name: Name, version: IdPath) -> Response:
    """Delete a version; retention no longer protects its checkpoint."""
    await services.write(lambda work: ModelRegistry(work).remove_version(name, version))
    return Response(status_code=204)


class VersionAliases(BaseModel):
    """Aliases of a version."""

    model_config = ConfigDict(extra="forbid")

    aliases: Annotated[
        list[Annotated[str, Field(max_length=64), AfterValidator(check_alias)]],
        Field(max_length=100),
    ]
    """All its aliases."""


@router.put("/models/{name}/versions/{version}/aliases")
async def set_version_aliases(
    services: ServicesDep, name: Name, version: IdPath, body: VersionAliases
) -> ModelAnswer:
    """Replace the aliases of a version; those of other versions move to it."""
    await services.write(
        lambda work: ModelRegistry(work).set_version_aliases(name, version, body.aliases)
    )
    return await _one(services, name)


class NewAlias(BaseModel):
    """Version to which an alias is assigned."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=1, le=MAX_ID, strict=True)]
    """Number of the version."""


@router.put("/models/{name}/aliases/{alias}")
async def set_alias(services: ServicesDep, name: Name, alias: Alias, body: NewAlias) -> ModelAnswer:
    """Assign an alias to a version of a model; it moves there from its previous one."""
    await services.write(lambda work: ModelRegistry(work).set_alias(name, alias, body.version))
    return await _one(services, name)


@router.delete("/models/{name}/aliases/{alias}", status_code=204)
async def delete_alias(services: ServicesDep, name: Name, alias: Alias) -> Response:
    """Remove an alias of a model; its version stays."""
    await services.write(lambda work: ModelRegistry(work).remove_alias(name, alias))
    return Response(status_code=204)
