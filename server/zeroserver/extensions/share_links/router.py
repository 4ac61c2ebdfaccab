"""Routes of share links.

The token is in the part of the link after ``#``, which browsers send to no server, so that no log
of a server or proxy contains it. The page exchanges it for a cookie.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from zerolab.errors import ForbiddenError, NotFoundError
from zeroserver.access.principal import HttpsDep, Principal, PrincipalDep
from zeroserver.access.routes import ACCESS, MEMBER, PUBLIC, SHARED, VIEWER, own
from zeroserver.api import queries
from zeroserver.api.common import MAX_ID, IdPath, Name, PagePath
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.share_links.resources import (
    NewShareAnswer,
    OpenedShare,
    Share,
    SharedExperiments,
    SharePage,
)
from zeroserver.extensions.share_links.service import NewShare, ShareService
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ExperimentRow, ShareRow, read_rows
from zeroserver.store.schema import experiments, shares
from zeroserver.store.user_directory import new_share_token

__all__ = ["router"]

router = resource_router("", "shares")

ACCESS.update(
    {
        "GET /api/v1/shares": VIEWER,
        "POST /api/v1/shares": MEMBER,  # it checks the owner of each experiment
        "DELETE /api/v1/shares/{share_id}": own("share"),
        "GET /api/v1/shared": SHARED,
        "POST /login/share": PUBLIC,
    }
)

_MOST = 100
"""Maximum number of experiments of a link."""
_DAY_S = 86400.0
_SESSION_S = 30 * _DAY_S
"""Maximum validity of a link that a browser session creates."""


def _resource(services: Services, row: ShareRow) -> Share:
    orchestrator = services.orchestrator
    return Share.of(
        row,
        owner=orchestrator.users.name_of(row.owner_id),
        experiments=msgspec.json.decode(row.experiment_ids),
        valid=orchestrator.shares.valid(row.id) is not None,
    )


@router.get("/api/v1/shares")
async def list_shares(
    services: ServicesDep,
    principal: PrincipalDep,
    experiment: Annotated[
        int | None, Query(ge=1, le=MAX_ID, description="Only links that show this experiment.")
    ] = None,
) -> SharePage:
    """List the share links of the user, newest first; administrators see those of all users."""
    query = select(shares).order_by(shares.c.id.desc())
    if not principal.is_admin:
        query = query.where(shares.c.owner_id == principal.user_id)
    rows = await services.read(lambda connection: read_rows(connection, ShareRow, query))
    listed = [_resource(services, row) for row in rows]
    return SharePage(
        [share for share in listed if experiment is None or experiment in share.experiments]
    )


class ShareBody(BaseModel):
    """New share link."""

    model_config = ConfigDict(extra="forbid")

    experiments: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_ID)]], Field(min_length=1, max_length=_MOST)
    ]
    """Experiments that it shows, of the same user unless an administrator creates it."""
    name: Annotated[Name, Field(max_length=100)] = ""
    """Purpose of the link."""
    path: PagePath | None = None
    """Page that it opens; default: the experiment, or the comparison of several."""
    expires_s: Annotated[float, Field(ge=1, le=366 * _DAY_S)] = 7 * _DAY_S
    """Validity in seconds."""


@router.post("/api/v1/shares", status_code=201)
async def create_share(
    services: ServicesDep, principal: PrincipalDep, body: ShareBody
) -> NewShareAnswer:
    """Create a share link; only this response contains its token."""
    ids = list(dict.fromkeys(body.experiments))
    await services.ownership.require(principal, "experiment", *map(str, ids))
    several = f"/compare/{','.join(map(str, ids))}"
    path = body.path or (several if len(ids) > 1 else f"/experiments/{ids[0]}")
    expires_at = time.time() + body.expires_s
    _check_expiry(services, principal, body.expires_s, expires_at)
    content = NewShare(principal.user_id, body.name, ids, path, expires_at)
    token = new_share_token()
    share_id = await services.write(lambda work: ShareService(work).create(content, token))
    query = select(shares).where(shares.c.id == share_id)
    (row,) = await services.read(lambda connection: read_rows(connection, ShareRow, query))
    return NewShareAnswer(f"/#/shared/{token}", _resource(services, row))


def _check_expiry(
    services: Services, principal: Principal, expires_s: float, expires_at: float
) -> None:
    """Check that a stolen session or token cannot become a link that stays for long.

    Raises:
        ForbiddenError: If the link would be valid for too long.
    """
    last = services.orchestrator.users.expiry_of(principal.token_id)
    if last is not None and expires_at > last:
        msg = f"expires_s: must end before {iso(last)}, when the token that creates it expires"
        raise ForbiddenError(msg)
    if principal.kind == "browser" and expires_s > _SESSION_S:
        msg = (
            f"expires_s: must be at most {_SESSION_S:.0f} (30 days) in a browser session, got "
            f"{expires_s:.0f}; use a token"
        )
        raise ForbiddenError(msg)


@router.delete("/api/v1/shares/{share_id}", status_code=204)
async def revoke_share(services: ServicesDep, share_id: IdPath) -> Response:
    """Revoke a share link; requests and event streams with it end at once."""
    await services.write(lambda work: ShareService(work).revoke(share_id))
    return Response(status_code=204)


@router.get("/api/v1/shared")
async def get_shared(services: ServicesDep, principal: PrincipalDep) -> SharedExperiments:
    """Read the content of the share link in the request; 404 without one."""
    share = services.orchestrator.shares.valid(principal.share_id)
    if share is None:
        raise NotFoundError("this request has no share link")

    def read(connection: Connection) -> SharedExperiments:
        columns = experiments.c
        query = select(experiments).where(columns.id.in_(share.experiment_ids))
        rows = read_rows(connection, ExperimentRow, query.order_by(columns.id.desc()))
        return SharedExperiments(
            name=share.row.name,
            path=share.row.path,
            expires_at=iso(share.row.expires_at) or "",
            experiments=[queries.experiment(row, services.orchestrator) for row in rows],
        )

    return await services.read(read)


class OpenShare(BaseModel):
    """Token of a share link."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    token: Annotated[str, Field(max_length=200)]


@router.post("/login/share")
async def open_share(
    services: ServicesDep, response: Response, https: HttpsDep, body: OpenShare
) -> OpenedShare:
    """Open a share link in a browser: set a cookie; 404 if it has expired or was revoked."""
    share = services.orchestrator.shares.find(body.token)
    if share is None:
        msg = "this share link has expired, was revoked or is incomplete; ask for a new one"
        raise NotFoundError(msg)
    response.set_cookie(
        services.keys.share_cookie,
        body.token,
        max_age=max(1, int(share.row.expires_at - time.time())),
        secure=https,
        httponly=True,
        samesite="strict",
        path="/",
    )
    return OpenedShare(share.row.path)
