"""Command group ``zerolab comment``."""

from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["group"]

group = command_group("Comment on experiments.", panel="Results")


@group.command("add")
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


@group.command("list")
def list_comments(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """List the comments on an experiment, oldest first.

    Example: zerolab comment list 3
    """
    from zerolab.cli.connection import connect
    from zerolab.contract.names import printable

    with connect() as client:
        comments = client.comments(experiment_id)
    if as_json:
        print_json(comments)
        return
    if not comments:
        print_message(f"experiment {experiment_id} has no comments")
    for comment in comments:
        edited = ", edited" if comment["edited_at"] else ""
        result(f"{comment['id']}  {comment['author']}, {comment['created_at']}{edited}")
        for line in comment["text"].splitlines():
            result(f"    {printable(line)}")
