"""Routes of users and their tokens; responses never contain hashes."""

import time
from typing import Annotated

from fastapi import Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from zerolab.errors import ConfigError, ForbiddenError, NotFoundError
from zeroserver.access.principal import HttpsDep, Principal, PrincipalDep
from zeroserver.access.routes import ACCESS, ADMIN, PUBLIC, SHARED, VIEWER, Access, Role, own
from zeroserver.api.cluster.server import set_session
from zeroserver.api.common import IdPath, Limit, Name, id_of
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.users.passwords import PasswordCheck
from zeroserver.extensions.users.resources import (
    ApiToken,
    ApiTokenPage,
    AuditEntry,
    AuditPage,
    NewApiToken,
    User,
    UserAnswer,
    UserPage,
    Whoami,
)
from zeroserver.extensions.users.service import UserChange, UserService
from zeroserver.extensions.users.user_names import USER_NAME, is_user_name
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import AuditRow, UserRow, read_rows
from zeroserver.store.schema import audit
from zeroserver.store.user_directory import new_token

__all__ = ["router"]

router = resource_router("", "users")

ACCESS.update(
    {
        "GET /api/v1/whoami": SHARED,
        "GET /api/v1/audit": ADMIN,
        "GET /api/v1/users": VIEWER,
        "POST /api/v1/users": ADMIN,
        "PATCH /api/v1/users/{user}": ADMIN,
        "GET /api/v1/users/{user}/tokens": own("user", "viewer"),
        # Browser sessions create no credentials: a stolen link must not outlive its session.
        "POST /api/v1/users/{user}/tokens": Access(frozenset({"user"}), "viewer", "user"),
        "DELETE /api/v1/users/{user}/tokens/{token_id}": own("user", "viewer"),
        "PUT /api/v1/users/{user}/password": own("user", "viewer"),
        "POST /login": PUBLIC,
    }
)

_MAX_EXPIRY_S = 3650 * 86400.0

UserName = Annotated[str, Path(max_length=64)]


def _find(services: Services, name: str) -> UserRow:
    user = services.orchestrator.users.find(name)
    if user is None:
        raise NotFoundError(f"there is no user {name}; `zerolab user list` lists them")
    return user


@router.get("/api/v1/whoami")
async def get_whoami(services: ServicesDep, principal: PrincipalDep) -> Whoami:
    """Read the user to whom the token or the browser session belongs, or the share link."""
    users = services.orchestrator.users
    share = services.orchestrator.shares.valid(principal.share_id)
    if share is not None:
        return Whoami("", "viewer", "share", iso(share.row.expires_at), shared=users.shared)
    return Whoami(
        user=principal.user,
        role=principal.role or "viewer",
        kind="browser" if principal.kind == "browser" else "token",
        expires_at=iso(users.expiry_of(principal.token_id)),
        shared=users.shared,
    )


@router.get("/api/v1/users")
async def list_users(services: ServicesDep) -> UserPage:
    """List the users, sorted by name."""
    return UserPage([User.of(user) for user in services.orchestrator.users.users()])


def _check_user_name(name: str) -> str:
    if not is_user_name(name):
        raise ValueError(f"must be {USER_NAME}, got {name[:80]!r}")
    return name


class NewUser(BaseModel):
    """New user."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, AfterValidator(_check_user_name)]
    """1 to 64 lower-case letters, digits, ``.``, ``_``, ``@`` or ``-``."""
    role: Role


@router.post("/api/v1/users", status_code=201)
async def create_user(services: ServicesDep, body: NewUser) -> UserAnswer:
    """Create a user, who has no token yet."""
    await services.write(lambda work: UserService(work).create(body.name, body.role))
    return UserAnswer(User.of(_find(services, body.name)))


class UserPatch(BaseModel):
    """Changes of a user; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    role: Role | None = None
    active: Annotated[bool, Field(strict=True)] | None = None
    """False revokes all tokens and browser sessions of the user."""
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] | None = None
    """Share of the slots, relative to other users; running trials continue."""


@router.patch("/api/v1/users/{user}")
async def patch_user(services: ServicesDep, user: UserName, patch: UserPatch) -> UserAnswer:
    """Change the role or the weight of a user, or deactivate or activate one."""
    change = UserChange(patch.role, patch.active, patch.weight)
    await services.write(lambda work: UserService(work).change(user, change))
    row = _find(services, user)
    if not row.active:
        await run_in_threadpool(services.keys.end_sessions_of, row.id)
    return UserAnswer(User.of(row))


Password = Annotated[str, Field(min_length=1, max_length=1000)]


class PasswordPut(BaseModel):
    """New password of a user."""

    model_config = ConfigDict(extra="forbid")

    password: Annotated[str, Field(min_length=12, max_length=1000)] | None
    """At least 12 characters; ``null`` for no sign-in with a password."""
    current_password: Password | None = None
    """Current password; not needed with a token that does not expire, nor by administrators with
    such a token."""


@router.put("/api/v1/users/{user}/password", status_code=204)
async def put_password(
    services: ServicesDep, principal: PrincipalDep, user: UserName, body: PasswordPut
) -> Response:
    """Set the password of a user, and end all browser sessions of the user."""
    row, check = _find(services, user), services.part(PasswordCheck)
    # A link or a token that expires must not become a password that stays.
    lasting = (
        principal.kind == "user"
        and services.orchestrator.users.expiry_of(principal.token_id) is None
    )
    if not lasting and (
        row.id != principal.user_id
        or not await run_in_threadpool(
            check.verify, user, row.password, body.current_password or ""
        )
    ):
        msg = (
            "current_password: must be the current password of the user, unless a token is used "
            "that does not expire"
        )
        raise ForbiddenError(msg)
    stored = None
    if body.password is not None:
        stored = await run_in_threadpool(check.hash, body.password)
    await services.write(lambda work: UserService(work).set_password(user, stored))
    await run_in_threadpool(services.keys.end_sessions_of, row.id)
    return Response(status_code=204)


class SignIn(BaseModel):
    """Name and password of a user."""

    model_config = ConfigDict(extra="forbid")

    user: Annotated[str, Field(max_length=64)]
    password: Password


@router.post("/login", status_code=204)
async def sign_in(
    services: ServicesDep, request: Request, https: HttpsDep, body: SignIn
) -> Response:
    """Sign a browser in with a password: set the cookie."""
    row = services.orchestrator.users.find(body.user)
    stored = row.password if row is not None and row.active else None
    check = services.part(PasswordCheck)
    valid = await run_in_threadpool(check.verify, body.user, stored, body.password)
    if not valid or row is None:
        msg = "the name or the password is wrong, or the user has no password"
        raise ForbiddenError(msg)
    session = services.keys.session_of(row.id)
    request.state.principal = services.keys.identify(None, session)  # for the audit log
    response = Response(status_code=204)
    set_session(response, services.keys, session, https=https)
    return response


@router.get("/api/v1/audit")
async def list_changes(
    services: ServicesDep,
    user: Annotated[str | None, Query(max_length=64, description="Name of a user.")] = None,
    after: Annotated[str | None, Query(max_length=20, description="Older than this id.")] = None,
    limit: Limit = 100,
) -> AuditPage:
    """List the changes that users made, newest first."""
    users = services.orchestrator.users
    query = select(audit).order_by(audit.c.id.desc()).limit(limit + 1)
    if user is not None:
        query = query.where(audit.c.user_id == _find(services, user).id)
    if after is not None:
        last = id_of(after)
        if last is None:
            raise ConfigError("request", [f"after: must be an id, got {after!r}"])
        query = query.where(audit.c.id < last)
    rows = await services.read(lambda connection: read_rows(connection, AuditRow, query))
    entries = [AuditEntry.of(row, user=users.name_of(row.user_id)) for row in rows[:limit]]
    return AuditPage(entries, str(entries[-1].id) if len(rows) > limit else None)


@router.get("/api/v1/users/{user}/tokens")
async def list_tokens(services: ServicesDep, user: UserName) -> ApiTokenPage:
    """List the API tokens of a user, oldest first."""
    rows = services.orchestrator.users.tokens_of(_find(services, user).id)
    return ApiTokenPage([ApiToken.of(row) for row in rows])


class NewTokenBody(BaseModel):
    """New token."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Name, Field(max_length=100)] = ""
    """Purpose of the token."""
    expires_s: Annotated[float, Field(ge=1, le=_MAX_EXPIRY_S)] | None = None
    """Validity in seconds; ``null``: it does not expire."""


@router.post("/api/v1/users/{user}/tokens", status_code=201)
async def create_token(
    services: ServicesDep,
    principal: PrincipalDep,
    user: UserName,
    body: NewTokenBody | None = None,
) -> NewApiToken:
    """Create an API token of a user; only this response contains it."""
    body = body or NewTokenBody()
    expires_at = None if body.expires_s is None else time.time() + body.expires_s
    _check_expiry(services, principal, expires_at)
    secret = new_token()
    token_id = await services.write(
        lambda work: UserService(work).create_token(user, secret, body.name, expires_at)
    )
    rows = services.orchestrator.users.tokens_of(_find(services, user).id)
    row = next(row for row in rows if row.id == token_id)
    return NewApiToken(secret=secret, token=ApiToken.of(row))


def _check_expiry(services: Services, principal: Principal, expires_at: float | None) -> None:
    """Check that a new token does not outlive the token with which it is created.

    Raises:
        ForbiddenError: If it would.
    """
    last = services.orchestrator.users.expiry_of(principal.token_id)
    if last is not None and (expires_at is None or expires_at > last):
        msg = f"expires_s: must end before {iso(last)}, when the token that creates it expires"
        raise ForbiddenError(msg)


@router.delete("/api/v1/users/{user}/tokens/{token_id}", status_code=204)
async def revoke_token(services: ServicesDep, user: UserName, token_id: IdPath) -> Response:
    """Revoke a token, and the browser sessions opened with its links."""
    await services.write(lambda work: UserService(work).revoke(user, token_id))
    return Response(status_code=204)
