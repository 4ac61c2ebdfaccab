"""Command group ``zerolab share``."""

from typing import Annotated

import typer

from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_done, print_json, print_message, print_table, result

__all__ = ["group"]

group = command_group("Share experiments with readers without an account.", panel="Results")


@group.command("create")
def create_share(
    experiments: Annotated[
        list[int], typer.Argument(metavar="EXPERIMENT...", help="Ids of the experiments.", min=1)
    ],
    view: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Open the experiments with this saved view."),
    ] = None,
    expires: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Validity: a number with m (minutes), h, d or w."),
    ] = "7d",
    name: Annotated[str, typer.Option(metavar="NAME", help="Purpose of the link.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a link that shows experiments without an account, and print it once.

    Whoever has the link sees trials, metrics, charts, media, hyperparameters and the configuration,
    but no logs, code or checkpoints. Several experiments are compared.

    Example: zerolab share create 3 4 --expires 7d
    """
    from zerolab.cli.connection import connect
    from zerolab.extensions.commands.user import parse_duration

    expires_s = parse_duration(expires, "share")
    with connect() as client:
        path = None if view is None else client.view(view)["path"]
        created = client.create_share(experiments, name=name, path=path, expires_s=expires_s)
    if as_json:
        print_json(created)
        return
    share = created["share"]
    valid = f"valid until {share['expires_at']}"
    print_message(f"share link {share['id']}, {valid}; it is not shown again")
    result(str(created["url"]))


@group.command("list")
def list_shares(as_json: AsJson = False) -> None:
    """List your share links, as an administrator those of all users.

    Example: zerolab share list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        shares = client.shares()
    if as_json:
        print_json(shares)
        return
    rows = [
        (
            share["id"],
            share["name"],
            share["owner"],
            " ".join(map(str, share["experiments"])),
            share["created_at"],
            share["expires_at"] if share["valid"] else "expired",
        )
        for share in shares
    ]
    print_table(
        ["id", "name", "owner", "experiments", "created", "expires"],
        rows,
        shortened={"experiments"},
    )


@group.command("revoke")
def revoke_share(
    share_id: Annotated[int, typer.Argument(metavar="ID", help="Id of the link.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Revoke a share link; its readers are refused at once.

    Example: zerolab share revoke 3
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.revoke_share(share_id)
    done = f"share link {share_id} is revoked"
    print_done({"id": share_id, "revoked": True}, done, as_json=as_json)
