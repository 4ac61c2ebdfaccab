"""Command ``zerolab submit``, which creates an experiment from a file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFiles, Values, read_overrides
from zerolab.cli.connection import InProject
from zerolab.cli.output import AsJson, print_json, print_message, print_warnings, result

__all__ = [
    "AsWandb",
    "Config",
    "ModelDir",
    "Test",
    "print_waiting_reason",
    "read_submission",
    "submit",
]

Config = Annotated[
    Path,
    typer.Argument(help="Experiment file, or a folder that contains an experiment.yaml."),
]
ModelDir = Annotated[
    Path | None,
    typer.Argument(
        help="Directory with the model's code. Default: the directory of the experiment file."
    ),
]
Test = Annotated[
    bool,
    typer.Option("--test", help="Train one batch, validate once, save one checkpoint, and stop."),
]
AsWandb = Annotated[
    bool,
    typer.Option("--as-wandb", help="Let `import wandb` in the trials report to Zerolab."),
]


def submit(
    config: Config,
    model_dir: ModelDir = None,
    changes: ChangesFiles = None,
    values: Values = None,
    project: InProject = None,
    test: Test = False,
    paused: Annotated[
        bool,
        typer.Option("--paused", help="Create it paused; `zerolab experiment activate` starts it."),
    ] = False,
    as_wandb: AsWandb = False,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment to the server, and print its id.

    Example: id=$(zerolab submit experiment.yaml)
    zerolab submit experiment.yaml --set searcher.max_trials=16
    """
    from zerolab.cli.connection import connect

    content, archive = read_submission(
        config, model_dir, changes, values, project, as_wandb=as_wandb
    )
    with connect() as client:
        experiment = client.create_experiment(content, archive, activate=not paused, test=test)
    if as_json:
        print_json(experiment)
        return
    print_message(f"experiment {experiment['id']}: {experiment['name']}")
    print_waiting_reason(experiment)
    result(str(experiment["id"]))


def print_waiting_reason(experiment: dict[str, Any]) -> None:
    """Print the warnings about a new experiment, and why it waits."""
    print_warnings(experiment)
    if experiment["waiting_reason"]:
        print_message(f"experiment {experiment['id']} waits: {experiment['waiting_reason']}")


def read_submission(
    config: Path,
    model_dir: Path | None,
    changes: list[Path] | None,
    values: list[str] | None,
    project: str | None = None,
    *,
    as_wandb: bool = False,
) -> tuple[dict[str, Any], bytes]:
    """Read and check an experiment and pack its model, before anything is started.

    Args:
        config: The experiment file or its folder.
        model_dir: The model directory, if it is not the folder of the file.
        changes: Files that are merged over it.
        values: ``KEY=VALUE`` overrides of the files.
        project: Project that overrides the file's.
        as_wandb: Whether ``import wandb`` reports to Zerolab.

    Raises:
        ConfigError: With every problem of the experiment file and its engine file.
    """
    from zerolab.client.archive import pack
    from zerolab.config.experiment.layers import merge_layers, read_layers
    from zerolab.config.experiment.model_files import FolderFiles
    from zerolab.config.files import experiment_file
    from zerolab.config.validation import check_experiment

    config = experiment_file(config)
    if as_wandb:
        values = [*(values or ()), "environment.wandb=zerolab"]
    content = merge_layers([*read_layers(config), *read_overrides(changes, values)])
    if project is not None:
        content["project"] = project
    directory = model_dir or config.absolute().parent
    check_experiment(content, FolderFiles(directory), str(config))
    return content, pack(directory)
