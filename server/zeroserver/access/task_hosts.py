"""Host names of interactive tasks, which separate their pages from the page of the server.

A page of a task runs code of its owner. From the origin of the server it could act for the user who
opens it. Browsers therefore open each task at a separate host name, ``task-9.localhost`` or
``task-9.DOMAIN``. The server accepts only the cookie of this task there.
"""

import re
from http import HTTPStatus

from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from zeroserver.access.tokens import TokenStore

__all__ = ["ENTRY", "PROXY", "TASK", "TaskHosts", "is_navigation", "sign_in_response"]

PROXY = "/proxy/"
"""Prefix of the paths that lead to the ports of tasks."""
TASK = "zerolab.task"
"""Key of a scope: id of the task whose host name the request names."""
ENTRY = "/.zerolab/enter"
"""Path, on a task's host, that exchanges a code for the cookie of the task."""
_LOCAL = "localhost"
_CLOSED = (
    "<!doctype html><meta charset=utf-8><title>Zerolab</title><p>You are not signed in to this "
    "task, or the session has ended. Open it from the page of Zerolab, or with <code>zerolab "
    "task open {}</code>."
)


class TaskHosts:
    """Host names of tasks and the sessions of browsers there.

    Args:
        domain: Domain below which each task has a host name, in addition to ``localhost``.
        keys: Tokens and cookies of the installation.
    """

    def __init__(self, domain: str, keys: TokenStore) -> None:
        domains = "|".join(re.escape(name) for name in (_LOCAL, domain) if name)
        self._pattern = re.compile(rf"task-([1-9][0-9]{{0,17}})\.(?:{domains})(?::\d+)?")
        self._keys = keys

    def enter(self, scope: Scope, host: str) -> bool:
        """Prefix the path of a request with its task, if the host name is a task's.

        Args:
            scope: Scope of the request; changed in place.
            host: Its ``Host`` header.

        Returns:
            Whether the host name is a task's.
        """
        match = self._pattern.fullmatch(host.lower())
        if match is None:
            return False
        prefix = f"{PROXY}{match[1]}"
        scope[TASK] = int(match[1])
        scope["path"] = prefix + scope["path"]
        scope["raw_path"] = prefix.encode() + scope.get("raw_path", b"/")
        return True

    def open_session(self, scope: Scope) -> Response | None:
        """Return the response that sets the cookie of a task; None for any other path."""
        if scope["path"] != f"{PROXY}{scope[TASK]}{ENTRY}" or scope["method"] != "GET":
            return None
        code = QueryParams(scope["query_string"]).get("code", "")
        session = self._keys.redeem_task(scope[TASK], code)
        if session is None:
            return HTMLResponse(_CLOSED.format(scope[TASK]), HTTPStatus.FORBIDDEN)
        response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        response.set_cookie(
            self._keys.task_cookie,
            session,
            max_age=int(self._keys.session_s),
            secure=scope["scheme"] == "https",
            httponly=True,
            samesite="lax",  # strict: not sent after the redirect from the page of the server
        )
        return response


def is_navigation(scope: Scope) -> bool:
    """Check whether a browser requests a page, rather than data for one."""
    headers = dict(scope["headers"])
    mode = headers.get(b"sec-fetch-mode", b"navigate")
    accepted = headers.get(b"accept", b"")
    return scope["method"] == "GET" and mode == b"navigate" and b"text/html" in accepted


def sign_in_response(scope: Scope) -> Response:
    """Return the response for a browser that is not signed in: the page, or an explanation."""
    if TASK in scope:
        return HTMLResponse(_CLOSED.format(scope[TASK]), HTTPStatus.UNAUTHORIZED)
    task = scope["path"].removeprefix(PROXY).partition("/")[0]
    page = f"/#/experiments/{task}" if task.isascii() and task.isdecimal() else "/"
    return RedirectResponse(page, HTTPStatus.SEE_OTHER)
