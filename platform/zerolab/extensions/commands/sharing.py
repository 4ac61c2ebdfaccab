"""Command groups ``zerolab share``, ``zerolab view`` and ``zerolab comment``."""

from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_done, print_json, print_message, print_table, result

__all__ = ["comments", "shares", "views"]

shares = command_group("Share experiments with readers without an account.", panel="Results")
views = command_group("List and delete saved views of the web page.", panel="Results")
comments = command_group("Comment on experiments.", panel="Results")


@shares.command("create")
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


@shares.command("list")
def list_shares(as_json: AsJson = False) -> None:
    """List your share links; administrators see those of all users.

    Example: zerolab share list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        listed = client.shares()
    if as_json:
        print_json(listed)
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
        for share in listed
    ]
    print_table(
        ["id", "name", "owner", "experiments", "created", "expires"],
        rows,
        shortened={"experiments"},
    )


@shares.command("revoke")
def revoke_share(
    share_id: Annotated[int, typer.Argument(metavar="ID", help="Id of the link.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Revoke a share link; it stops working at once.

    Example: zerolab share revoke 3
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.revoke_share(share_id)
    done = f"share link {share_id} is revoked"
    print_done({"id": share_id, "revoked": True}, done, as_json=as_json)


@views.command("list")
def list_views(as_json: AsJson = False) -> None:
    """List your saved views and the shared views of others.

    The page saves views: filters, columns, order and chart settings. Open one in the page.

    Example: zerolab view list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        listed = client.views()
    if as_json:
        print_json(listed)
        return
    rows = [
        (view["name"], view["owner"], "yes" if view["shared"] else "no", view["path"])
        for view in listed
    ]
    print_table(["name", "owner", "shared", "address"], rows, shortened={"address"})


@views.command("delete")
def delete_view(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the view.")],
    as_json: AsJson = False,
) -> None:
    """Delete one of your saved views; administrators can also delete shared ones.

    Example: zerolab view delete "best runs"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        view = client.view(name)
        client.delete_view(view["id"])
    print_done({"name": name, "deleted": True}, f"view {name} is deleted", as_json=as_json)


@comments.command("add")
def add_comment(
    experiment_id: ExperimentId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Plain text.")],
    as_json: AsJson = False,
) -> None:
    """Add a comment to an experiment, and print its id.

    Example: zerolab comment add 3 "The learning rate is too high."
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        comment = client.add_comment(experiment_id, text)
    if as_json:
        print_json(comment)
    else:
        result(str(comment["id"]))


@comments.command("list")
def list_comments(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """List the comments on an experiment, oldest first.

    Example: zerolab comment list 3
    """
    from zerolab.cli.connection import connect
    from zerolab.contract.names import printable

    with connect() as client:
        listed = client.comments(experiment_id)
    if as_json:
        print_json(listed)
        return
    if not listed:
        print_message(f"experiment {experiment_id} has no comments")
    for comment in listed:
        edited = ", edited" if comment["edited_at"] else ""
        result(f"{comment['id']}  {comment['author']}, {comment['created_at']}{edited}")
        for line in comment["text"].splitlines():
            result(f"    {printable(line)}")
