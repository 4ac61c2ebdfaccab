"""Command ``zerolab import``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["import_file"]


@in_panel("Results")
def import_file(
    file: Annotated[Path, typer.Argument(help="metrics.jsonl of the run.")],
    as_json: AsJson = False,
) -> None:
    """Import a run without a server, and print the id.

    The new experiment contains the metrics of the run.

    Example: zerolab import .zerolab/runs/train/metrics.jsonl
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    try:
        content = file.read_bytes()
    except OSError as error:
        problem = (
            f"must be the metrics.jsonl of a run ({error.strerror}); "
            "scripts without a server write it to .zerolab/runs/"
        )
        raise ConfigError(str(file), [problem]) from None
    with connect() as client:
        experiment = client.import_metrics(content)
    if as_json:
        print_json(experiment)
        return
    print_message(f"imported {file} as experiment {experiment['id']}")
    result(str(experiment["id"]))
