"""Command ``zerolab import``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.output import print_json, print_message, result

__all__ = ["import_file"]


def import_file(
    file: Annotated[Path, typer.Argument(help="Metrics file (JSON lines) of such a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the experiment as JSON.")] = False,
) -> None:
    """Import the metrics of a run without a server; prints the experiment's id."""
    from zerolab.cli.connection import connect

    with connect() as client:
        experiment = client.import_metrics(file.read_bytes())
    if as_json:
        print_json(experiment)
        return
    print_message(f"{file} is experiment {experiment['id']} now")
    result(str(experiment["id"]))
