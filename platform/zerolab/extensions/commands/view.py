"""Command group ``zerolab view``."""

from typing import Annotated

import typer

from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_done, print_json, print_table

__all__ = ["group"]

group = command_group("List and delete saved views of the web page.", panel="Results")


@group.command("list")
def list_views(as_json: AsJson = False) -> None:
    """List your saved views and the shared views of others.

    The page saves views: filters, columns, order and chart settings. Open one in the page.

    Example: zerolab view list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        views = client.views()
    if as_json:
        print_json(views)
        return
    rows = [
        (view["name"], view["owner"], "yes" if view["shared"] else "no", view["path"])
        for view in views
    ]
    print_table(["name", "owner", "shared", "address"], rows, shortened={"address"})


@group.command("delete")
def delete_view(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the view.")],
    as_json: AsJson = False,
) -> None:
    """Delete a saved view of yours, or as an administrator a shared one.

    Example: zerolab view delete "best runs"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        view = client.view(name)
        client.delete_view(view["id"])
    print_done({"name": name, "deleted": True}, f"view {name} is deleted", as_json=as_json)
