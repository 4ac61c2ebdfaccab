"""Command ``zerolab plan``."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.groups import single_command

__all__ = ["app"]

app = single_command()


@app.command(
    rich_help_panel="Train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def plan(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Experiment file, or the folder of the experiment.")],
) -> None:
    """Estimate the memory of each rank at every ZeRO stage.

    More options: --world-size N; --gpu-memory GB and --host-memory GB, to plan for other machines
    than this one; --json.

    Example: zerolab plan experiment.yaml --world-size 8 --gpu-memory 80
    """
    import subprocess
    import sys

    from zerolab.config.files import experiment_file

    file = experiment_file(file)
    command = [sys.executable, "-P", "-m", "zerotrial.extensions.planner", str(file), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
