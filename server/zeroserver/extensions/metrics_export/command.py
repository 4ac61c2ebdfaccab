"""Command ``zerolab experiment metrics``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId
from zerolab.cli.output import print_message

__all__ = ["metrics"]


def metrics(
    experiment_id: ExperimentId,
    form: Annotated[str, typer.Option("--format", help="csv or ndjson.")] = "csv",
    output: Annotated[Path | None, typer.Option(help="File to write. Default: print.")] = None,
) -> None:
    """Export every point of every metric.

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
    print_message(f"written to {output}")
