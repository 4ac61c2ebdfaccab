"""Routes of saved views."""

from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, Select, delete, func, or_, select, update

from zerolab.errors import ConflictError, NotFoundError
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, VIEWER, own
from zeroserver.api.common import IdPath, Name, PagePath
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.saved_views.resources import View, ViewAnswer, ViewPage
from zeroserver.orchestrator.service import Service
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ViewRow, read_row, read_rows
from zeroserver.store.schema import views

__all__ = ["router"]

router = resource_router("/api/v1/views", "views")

ACCESS.update(
    {
        "GET /api/v1/views": VIEWER,
        "POST /api/v1/views": VIEWER,  # of the user's own
        "PATCH /api/v1/views/{view_id}": own("view", "viewer"),
        "DELETE /api/v1/views/{view_id}": own("view", "viewer"),
    }
)

_MAX_VIEWS = 200
"""Maximum number of views of a user."""


class _ViewService(Service):
    """Creates and changes saved views."""

    def create(self, owner_id: int, values: dict[str, Any]) -> int:
        """Store a view and return its id.

        Raises:
            ConflictError: If the user has one with the name, or too many.
        """
        self._check_name(owner_id, values["name"])
        count = select(func.count()).select_from(views).where(views.c.owner_id == owner_id)
        if (self.work.connection.scalar(count) or 0) >= _MAX_VIEWS:
            raise ConflictError(f"there are {_MAX_VIEWS} views; delete one first")
        now = self.work.clock()
        row = {**values, "owner_id": owner_id, "created_at": now, "updated_at": now}
        query = views.insert().values(row).returning(views.c.id)
        return int(self.work.connection.execute(query).scalar_one())

    def change(self, view_id: int, values: dict[str, Any]) -> None:
        """Change a view.

        Raises:
            NotFoundError: If there is no such view.
            ConflictError: If its owner has another one with the new name.
        """
        row = read_row(self.work.connection, ViewRow, select(views).where(views.c.id == view_id))
        if row is None:
            raise _missing(view_id)
        if values.get("name", row.name) != row.name:
            self._check_name(row.owner_id, values["name"])
        values = {**values, "updated_at": self.work.clock()}
        self.work.connection.execute(update(views).where(views.c.id == view_id).values(values))

    def remove(self, view_id: int) -> None:
        """Delete a view.

        Raises:
            NotFoundError: If there is no such view.
        """
        query = delete(views).where(views.c.id == view_id)
        if self.work.connection.execute(query).rowcount == 0:
            raise _missing(view_id)

    def _check_name(self, owner_id: int, name: str) -> None:
        query = select(views.c.id).where(views.c.owner_id == owner_id, views.c.name == name)
        if self.work.connection.scalar(query) is not None:
            raise ConflictError(f"view {name}: exists already; delete it, or use another name")


def _missing(view_id: int) -> NotFoundError:
    return NotFoundError(f"there is no view {view_id}; `zerolab view list` lists them")


async def _read(services: Services, query: Select[Any]) -> list[View]:
    users = services.orchestrator.users

    def read(connection: Connection) -> list[View]:
        rows = read_rows(connection, ViewRow, query)
        return [View.of(row, owner=users.name_of(row.owner_id)) for row in rows]

    return await services.read(read)


async def _one(services: Services, view_id: int) -> ViewAnswer:
    found = await _read(services, select(views).where(views.c.id == view_id))
    if not found:  # deleted concurrently
        raise _missing(view_id)
    return ViewAnswer(found[0])


@router.get("")
async def list_views(services: ServicesDep, principal: PrincipalDep) -> ViewPage:
    """List the user's views and the shared views of others, sorted by name."""
    visible = or_(views.c.owner_id == principal.user_id, views.c.shared == 1)
    query = select(views).where(visible).order_by(views.c.name, views.c.id)
    return ViewPage(await _read(services, query))


class NewView(BaseModel):
    """New view."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Name, Field(min_length=1, max_length=100)]
    path: PagePath
    """Part of a page address after `#`."""
    shared: Annotated[bool, Field(strict=True)] = False
    """Whether all users see it."""


@router.post("", status_code=201)
async def create_view(services: ServicesDep, principal: PrincipalDep, body: NewView) -> ViewAnswer:
    """Save a view of the user."""
    values = body.model_dump() | {"shared": int(body.shared)}
    view_id = await services.write(
        lambda work: _ViewService(work).create(principal.user_id, values)
    )
    return await _one(services, view_id)


class ViewPatch(BaseModel):
    """Changes of a view; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Name, Field(min_length=1, max_length=100)] | None = None
    path: PagePath | None = None
    """Part of a page address after `#`."""
    shared: Annotated[bool, Field(strict=True)] | None = None
    """Whether all users see it."""


@router.patch("/{view_id}")
async def patch_view(services: ServicesDep, view_id: IdPath, patch: ViewPatch) -> ViewAnswer:
    """Rename a view, replace what it shows, or share it."""
    values = patch.model_dump(exclude_none=True)
    if patch.shared is not None:
        values["shared"] = int(patch.shared)
    await services.write(lambda work: _ViewService(work).change(view_id, values))
    return await _one(services, view_id)


@router.delete("/{view_id}", status_code=204)
async def delete_view(services: ServicesDep, view_id: IdPath) -> Response:
    """Delete a view."""
    await services.write(lambda work: _ViewService(work).remove(view_id))
    return Response(status_code=204)
