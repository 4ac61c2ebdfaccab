"""Command ``zerolab experiment metrics``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId, complete_from
from zerolab.cli.groups import in_panel
from zerolab.cli.output import print_message

__all__ = ["metrics"]


@in_panel("Inspect")
def metrics(
    experiment_id: ExperimentId,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="csv, or ndjson: one JSON object per line.",
            autocompletion=complete_from("csv", "ndjson"),
        ),
    ] = "csv",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file instead of printing."
        ),
    ] = None,
) -> None:
    """Export all values of all metrics as CSV or JSON lines.

    Example: zerolab experiment metrics 1 --output m.csv
    """
    import sys

    from zerolab.cli.connection import connect

    with connect() as client:
        pieces = client.export_metrics(experiment_id, format=form)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        with output.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    print_message(f"wrote {output}")
