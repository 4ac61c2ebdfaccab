"""Routes of the sign-in with a provider."""

import html
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import HTMLResponse, RedirectResponse

from zerolab.errors import ForbiddenError, NotFoundError, ZerolabError
from zeroserver.access.principal import HttpsDep
from zeroserver.access.routes import ACCESS, PUBLIC
from zeroserver.api.cluster.server import set_session
from zeroserver.api.strict_route import resource_router
from zeroserver.errors import error_response
from zeroserver.extensions.oidc.service import OidcUsers
from zeroserver.extensions.oidc.settings import SIGN_IN_S
from zeroserver.services import Services, ServicesDep

if TYPE_CHECKING:  # imports joserfc
    from zeroserver.extensions.oidc.provider import OidcProvider

__all__ = ["router"]

logger = logging.getLogger(__name__)

router = resource_router("", "users")

ACCESS.update(
    {
        "GET /login/methods": PUBLIC,
        "GET /login/oidc": PUBLIC,
        "GET /login/oidc/callback": PUBLIC,
    }
)

_PATH = "/login/oidc"
_COOKIE = "zerolab-oidc"

_OPEN_PAGE = (
    '<!doctype html><title>Zerolab</title><meta http-equiv="refresh" content="0;url=/">'
    '<p>Signed in. <a href="/">Continue</a>'
)

Text = Annotated[str, Query(max_length=4096)]


class _Provider:
    """The provider of a server, made by the first sign-in."""

    settings: Any = None

    @cached_property
    def provider(self) -> "OidcProvider":
        from zeroserver.extensions.oidc.provider import OidcProvider  # slow import

        return OidcProvider(self.settings)


def _provider(services: Services) -> "OidcProvider":
    settings = services.settings.oidc
    if settings is None:
        raise NotFoundError("this server has no sign-in with a provider; see its option --oidc")
    part = services.part(_Provider)
    part.settings = settings
    return part.provider


class SignInMethods(BaseModel):
    """Ways to sign in besides a password and a link."""

    oidc: str | None
    """Name of the provider; null: the server has none."""


@router.get("/login/methods")
async def list_sign_in_methods(services: ServicesDep) -> SignInMethods:
    """Read how browsers can sign in besides a password and a link."""
    settings = services.settings.oidc
    return SignInMethods(oidc=None if settings is None else settings.label)


_FAILED = {"content": {"text/html": {}}, "description": "It cannot be used.", "x-own": True}
_REDIRECT: dict[int | str, dict[str, Any]] = {
    303: {"description": "The provider's page."},
    403: _FAILED,
    404: _FAILED,
}


@router.get(_PATH, response_class=HTMLResponse, responses=_REDIRECT)
async def begin_sign_in(services: ServicesDep, request: Request, https: HttpsDep) -> Response:
    """Send the browser to the provider."""
    callback = str(request.url.replace(path=f"{_PATH}/callback", query="", fragment=""))
    try:
        url, state = await _provider(services).begin(callback)
    except ZerolabError as error:
        return _problem(error)
    response = RedirectResponse(url, status_code=303)
    # Lax, since the provider's page sends the browser back.
    response.set_cookie(
        _COOKIE, state, max_age=SIGN_IN_S, secure=https, httponly=True, samesite="lax", path=_PATH
    )
    return response


async def finish_sign_in(
    services: ServicesDep,
    request: Request,
    https: HttpsDep,
    *,
    state: Text = "",
    code: Text = "",
    error: Text = "",
) -> Response:
    """Sign in the user whom the provider names: set the cookie and open the page."""
    try:
        provider = _provider(services)
        if not state or request.cookies.get(_COOKIE) != state:
            msg = "this browser has not begun the sign-in, or it blocks cookies; sign in again"
            raise ForbiddenError(msg)
        if error:
            raise ForbiddenError(f"the provider refused the sign-in: {error[:200]}")
        identity = await provider.finish(state, code)
        user = await services.write(
            lambda work: OidcUsers(work).sign_in(
                identity.subject, identity.name, provider.settings.new_users
            )
        )
    except ZerolabError as problem:
        return _problem(problem)
    session = services.keys.session_of(user.id)
    await services.record_change(services.keys.identify(None, session), f"GET {_PATH}/callback")
    # The session's cookie is strict: a browser does not send it with a redirect that began at the
    # provider, but with a page that this server has sent.
    response = HTMLResponse(_OPEN_PAGE)
    response.delete_cookie(_COOKIE, secure=https, httponly=True, samesite="lax", path=_PATH)
    set_session(response, services.keys, session, https=https)
    return response


router.add_api_route(
    f"{_PATH}/callback",
    finish_sign_in,
    methods=["GET"],
    response_class=HTMLResponse,
    responses=_REDIRECT,
    route_class_override=APIRoute,  # providers add parameters, such as iss and session_state
)


def _problem(error: ZerolabError) -> Response:
    """Return the page of a failed sign-in."""
    # Parts of the message come from outside: a line break would forge a line of the log.
    text = "".join(character for character in str(error) if character.isprintable())
    if not isinstance(error, NotFoundError):  # a server without a provider
        logger.warning("sign-in with the provider: %s", text)
    return HTMLResponse(
        f'<!doctype html><title>Zerolab</title><p>{html.escape(text)}<p><a href="/">Back</a>',
        status_code=error_response(error).status_code,
    )
