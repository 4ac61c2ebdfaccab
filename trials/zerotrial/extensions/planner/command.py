"""Command ``zerolab plan``."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
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
    command = [sys.executable, "-P", "-m", "zerotrial.extensions.planner", str(file), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
