"""Command ``zerolab experiment metrics``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId
from zerolab.cli.groups import in_panel
from zerolab.cli.output import print_message, removed_values
from zerolab.errors import ConfigError

__all__ = ["metrics"]


class Form(StrEnum):
    """Format of an export."""

    CSV = "csv"
    NDJSON = "ndjson"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"


@in_panel("Inspect")
def metrics(
    experiment_id: ExperimentId,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="csv; ndjson, with one JSON object per line; parquet, which needs pyarrow; "
            "tensorboard, a directory for each trial.",
        ),
    ] = Form.CSV,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write to this file instead of printing (also -); directory for tensorboard.",
        ),
    ] = None,
) -> None:
    """Export all values of all metrics.

    Example: zerolab experiment metrics 1 --output m.csv
    zerolab experiment metrics 1 --format parquet --output m.parquet
    """
    import sys

    from zerolab.cli.connection import connect
    from zeroserver.extensions.metrics_export.files import (
        write_file,
        write_parquet,
        write_tensorboard,
    )

    if output == Path("-"):
        output = None
    if output is None and form in {Form.PARQUET, Form.TENSORBOARD}:
        problem = f"--output: must be given with --format {form}"
        raise ConfigError("zerolab experiment metrics", [problem])
    with connect() as client:
        experiment = client.experiment(experiment_id)
        if experiment["metrics_expired_at"] is not None:
            print_message(removed_values(experiment))
        if output is not None and form in {Form.PARQUET, Form.TENSORBOARD}:
            write = write_parquet if form == Form.PARQUET else write_tensorboard
            count = write(client, experiment_id, output)
            print_message(f"wrote {count:,} points to {output}")
            return
        pieces = client.export_metrics(experiment_id, format=form)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        write_file(pieces, output)
    print_message(f"wrote {output}")
