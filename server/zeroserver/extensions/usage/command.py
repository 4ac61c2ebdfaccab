"""Command ``zerolab usage``."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_json, print_table

__all__ = ["usage"]


class Group(StrEnum):
    """Groups of the report."""

    USER = "user"
    PROJECT = "project"
    LABEL = "label"
    POOL = "pool"


@in_panel("Server")
def usage(
    by: Annotated[Group, typer.Option(help="Sum up by user, project, label or pool.")] = Group.USER,
    month: Annotated[
        str | None,
        typer.Option(metavar="YYYY-MM", help="Month in UTC. Default: the current one."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show slot-hours in a month, and the disk usage now.

    Example: zerolab usage --by label --month 2026-11 --csv
    """
    import csv

    from zerolab.cli.connection import connect
    from zerolab.contract.flatten import safe_cell
    from zerolab.errors import ConfigError
    from zerolab.formatting import size_text

    if as_csv and as_json:
        raise ConfigError("usage", ["--csv, --json: must not be given together"])
    with connect() as client:
        page = client.usage(by=by.value, month=month)
    rows = page["usage"]
    if as_json:
        print_json(page)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["month", by.value, "experiments", "slot_hours", "disk_bytes"])
        for row in rows:
            hours = f"{row['slot_hours']:.3f}"
            name = safe_cell(row["name"])
            writer.writerow([page["month"], name, row["experiments"], hours, row["disk_bytes"]])
    else:
        table = [
            (
                row["name"] or f"(no {by.value})",
                row["experiments"],
                f"{row['slot_hours']:,.1f}",
                size_text(row["disk_bytes"]),
            )
            for row in rows
        ]
        print_table([by.value, "experiments", "slot hours", "disk"], table)
