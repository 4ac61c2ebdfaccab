"""Command group ``zerolab user``, the tokens of users, and ``zerolab whoami``."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import complete_from, complete_from_server
from zerolab.cli.groups import NUMBERS, command_group, in_panel
from zerolab.cli.output import (
    AsJson,
    age,
    print_done,
    print_fields,
    print_json,
    print_message,
    print_table,
    result,
)

if TYPE_CHECKING:  # commands import the client when they need it
    from collections.abc import Iterable

    from zerolab.client.http import Client

__all__ = [
    "audit",
    "create_token",
    "group",
    "list_tokens",
    "parse_duration",
    "revoke_token",
    "whoami",
]

_PANEL = "Server"
group = command_group("Manage users and their roles.", panel=_PANEL)

_ROLES = ("viewer", "member", "admin")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _names(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    yield from ((user["name"], user["role"]) for user in client.users())


_complete_user = complete_from_server(_names)
UserName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the user.", autocompletion=_complete_user)
]
_ROLE_HELP = "viewer: reads. member: also submits, and changes what they own. admin: everything."
Owner = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="NAME",
        help="Name of the user. Default: yourself. Others need the role admin.",
        autocompletion=_complete_user,
    ),
]


def _check_role(role: str, key: str) -> None:
    """Check a role before any request.

    Raises:
        ConfigError: If it is unknown.
    """
    from zerolab.errors import ConfigError

    if role not in _ROLES:
        choices = ", ".join(_ROLES)
        raise ConfigError("user", [f"{key}: must be one of {choices}, got {role!r}"])


@group.command("create")
def create_user(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Lower-case letters, digits and . _ @ - (at most 64)."),
    ],
    role: Annotated[
        str, typer.Option(metavar="ROLE", help=_ROLE_HELP, autocompletion=complete_from(*_ROLES))
    ],
    as_json: AsJson = False,
) -> None:
    """Create a user, and print the name.

    The user needs a token: create one with `zerolab token create --user NAME`.

    Example: zerolab user create ann --role member
    """
    from zerolab.cli.connection import connect

    _check_role(role, "--role")
    with connect() as client:
        user = client.create_user(name, role)
    if as_json:
        print_json(user)
    else:
        result(str(user["name"]))


@group.command("list")
def list_users(as_json: AsJson = False) -> None:
    """List the users with their roles.

    Example: zerolab user list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        users = client.users()
    if as_json:
        print_json(users)
        return
    rows = [
        (
            user["name"],
            user["role"],
            "yes" if user["active"] else "no",
            f"{user['weight']:g}",
            user["created_at"],
        )
        for user in users
    ]
    print_table(["name", "role", "active", "weight", "created"], rows)


@group.command("set-role")
def set_role(
    name: UserName,
    role: Annotated[
        str,
        typer.Argument(metavar="ROLE", help=_ROLE_HELP, autocompletion=complete_from(*_ROLES)),
    ],
    as_json: AsJson = False,
) -> None:
    """Change the role of a user; it applies to the next request.

    Example: zerolab user set-role ann admin
    """
    from zerolab.cli.connection import connect

    _check_role(role, "ROLE")
    with connect() as client:
        user = client.patch_user(name, role=role)
    print_done(user, f"user {name} has the role {role}", as_json=as_json)


@group.command("set-weight", context_settings=NUMBERS)
def set_weight(
    name: UserName,
    weight: Annotated[float, typer.Argument(help="Share relative to other users; default 1.")],
    as_json: AsJson = False,
) -> None:
    """Change the share of the slots that a user gets while others wait.

    Applies to pools with the policy `fair_share`. Running trials continue.

    Example: zerolab user set-weight ann 2
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        user = client.patch_user(name, weight=weight)
    print_done(user, f"user {name} has the weight {user['weight']:g}", as_json=as_json)


@group.command("deactivate")
def deactivate(name: UserName, as_json: AsJson = False) -> None:
    """Refuse a user, and revoke all tokens and browser sessions.

    Experiments and models stay, and running trials continue.

    Example: zerolab user deactivate ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        user = client.patch_user(name, active=False)
    message = f"user {name} is deactivated; all tokens and browser sessions are revoked"
    print_done(user, message, as_json=as_json)


@group.command("activate")
def activate(name: UserName, as_json: AsJson = False) -> None:
    """Allow a deactivated user again, who needs a new token.

    Example: zerolab user activate ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        user = client.patch_user(name, active=True)
    message = f"user {name} is active; `zerolab token create --user {name}` creates a token"
    print_done(user, message, as_json=as_json)


@group.command("set-password")
def set_password(
    user: Owner = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the password instead of setting one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Set the password with which a user signs in on the web page.

    Reads the password from the terminal, or one line of standard input. All browser sessions of
    the user end. With a token that expires, the current password is needed, too.

    Example: zerolab user set-password --user ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        caller = client.whoami()
        name = user or caller["user"]
        current = _read_secret("Current password") if caller["expires_at"] else None
        password = None if remove else _read_secret("New password", confirm=True)
        client.set_password(name, password, current=current)
    done = "has no password" if remove else "has a new password"
    print_done({"user": name, "password": not remove}, f"user {name} {done}", as_json=as_json)


def _read_secret(prompt: str, *, confirm: bool = False) -> str:
    """Read a password from the terminal, or one line of standard input; never from arguments."""
    import sys

    if sys.stdin.isatty():
        return str(typer.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True))
    return sys.stdin.readline().rstrip("\n")


def parse_duration(
    text: str | None, subject: str = "token", option: str = "--expires"
) -> float | None:
    """Parse a duration such as 30d.

    Args:
        text: Value of the option; None if it is not given.
        subject: Subject of the error.
        option: Name of the option.

    Returns:
        Seconds; None for None.

    Raises:
        ConfigError: If it is invalid.
    """
    from zerolab.errors import ConfigError

    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhdw])", text)
    if match is None:
        problem = f"{option}: must be a number with s, m, h, d or w, such as 30d, got {text!r}"
        raise ConfigError(subject, [problem])
    return float(int(match[1]) * _UNITS_S[match[2]])


@in_panel("Tokens of users")
def create_token(
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Validity: a number with m (minutes), h, d or w. Default: never expires.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Purpose of the token, such as a machine.")
    ] = "",
    user: Owner = None,
    as_json: AsJson = False,
) -> None:
    """Create a token of a user, and print it once.

    The server stores only its hash. A token that expires cannot create one that lasts longer.

    Example: zerolab token create --user ann --expires 30d > ann.token
    """
    from zerolab.cli.connection import connect

    expires_s = parse_duration(expires)
    with connect() as client:
        created = client.create_token(user, name=name, expires_s=expires_s)
    if as_json:
        print_json(created)
        return
    token = created["token"]
    end = f"valid until {token['expires_at']}" if token["expires_at"] else "valid until revoked"
    print_message(f"token {token['id']}, {end}; it is not shown again")
    result(str(created["secret"]))


@in_panel("Tokens of users")
def list_tokens(user: Owner = None, as_json: AsJson = False) -> None:
    """List the tokens of a user, without the secrets.

    Example: zerolab token list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        tokens = client.tokens(user)
    if as_json:
        print_json(tokens)
        return
    rows = [
        (
            token["id"],
            token["name"],
            token["created_at"],
            token["expires_at"] or "never",
            f"{age(token['last_used_at'])} ago" if token["last_used_at"] else "never",
        )
        for token in tokens
    ]
    print_table(["id", "name", "created", "expires", "last used"], rows)


@in_panel("Tokens of users")
def revoke_token(
    token_id: Annotated[int, typer.Argument(metavar="ID", help="Id of the token.", min=1)],
    user: Owner = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, and the browser sessions opened with it.

    Example: zerolab token revoke 3
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.revoke_token(token_id, user)
    print_done({"id": token_id, "revoked": True}, f"token {token_id} is revoked", as_json=as_json)


@in_panel(_PANEL)
def audit(
    user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="List only changes of this user.", autocompletion=_complete_user
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number to list.", min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """List the changes that users made, newest first.

    An action is the method and the path of a request. Needs the role admin.

    Example: zerolab audit --user ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        changes = client.changes(user=user, limit=limit)
    if as_json:
        print_json(changes)
        return
    rows = [
        (change["time"], change["user"], change["token_id"] or "", change["action"])
        for change in changes
    ]
    print_table(["time", "user", "token", "action"], rows)


@in_panel(_PANEL)
def whoami(as_json: AsJson = False) -> None:
    """Show the user to whom the token in use belongs.

    Example: zerolab whoami
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        caller = client.whoami()
    if as_json:
        print_json(caller)
        return
    print_fields(
        {"user": caller["user"], "role": caller["role"], "token expires": caller["expires_at"]}
    )
