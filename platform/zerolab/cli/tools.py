"""Commands ``import``, ``plan`` and ``version``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.output import print_json, print_message, result

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the root."""
    app.command(name="import")(import_file)
    passing = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=passing)(plan)
    app.command()(version)


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


def plan(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="experiment.yaml, with the model beside it.")],
) -> None:
    """Print the memory of each rank at every ZeRO stage, before anything trains.

    Further options go to `python -m zerotrial.plan`: --world-size N, --gpu-memory GB and
    --host-memory GB (for other GPUs than those of this machine), --json.
    Example: zerolab plan experiment.yaml --world-size 8 --gpu-memory 80
    """
    import subprocess
    import sys

    from zerolab.config.files import experiment_file

    file = experiment_file(file)
    command = [sys.executable, "-P", "-m", "zerotrial.plan", str(file), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def version() -> None:
    """Print the version."""
    from zerolab import __version__

    result(__version__)
