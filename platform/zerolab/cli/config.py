"""Command ``zerolab config``, which checks files without a server and without torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFiles, Values, read_overrides
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["group"]

group = command_group("Check experiment files and engine files.", panel="Train")


@group.callback()
def about() -> None:
    """Make typer keep the group with a single command."""


@group.command()
def check(
    file: Annotated[Path, typer.Argument(help="Experiment file (YAML) or engine file (JSON).")],
    changes: ChangesFiles = None,
    values: Values = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks. Default: slots_per_trial of the experiment; of an engine file "
            "the smallest number that its parallelism allows.",
        ),
    ] = None,
    hyperparameters: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='YAML or JSON file with the values for "auto" in an engine file: '
            "hyperparameters, training arguments, or an experiment file.",
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Report keys that this version of torch does not support, such as 2.7.1.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Report comments, old key names and Hugging Face's keys in an engine file as "
            "errors.",
        ),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Print all settings, with defaults.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check an experiment file or an engine file.

    Prints the settings of the file, or all its problems with exit code 2. It needs neither a
    server nor torch.

    Example: zerolab config check experiment.yaml
    zerolab config check experiment.yaml --set searcher.max_trials=16 --all
    zerolab config check ds_config.json --world-size 4 --all
    """
    from zerolab.config.validation import check_file
    from zerolab.errors import ConfigError

    try:
        auto_values = None if hyperparameters is None else _read_hyperparameters(hyperparameters)
        report = check_file(
            file,
            world_size,
            auto_values,
            read_overrides(changes, values),
            strict=strict,
            torch=torch,
            full=show_all,
        )
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"ok": False, "problems": list(error.problems)})
        raise typer.Exit(2) from None
    report = report.rstrip("\n")
    if as_json:
        print_json({"ok": True, "report": report.splitlines()})
        return
    result(report)
    if not show_all:
        print_message(f"to include default settings: zerolab config check {file} --all")


def _read_hyperparameters(file: Path) -> dict[str, Any]:
    """Return the values of a file, or of an experiment file's block ``hyperparameters``."""
    from zerolab.config.files import read_json, read_yaml

    content = read_json(file) if file.suffix.lower() == ".json" else read_yaml(file)
    inner = content.get("hyperparameters")
    return inner if isinstance(inner, dict) else content
