"""Commands ``run`` and ``submit``, which create an experiment from a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.output import (
    ColoredText,
    Port,
    checkpoint_text,
    end_state,
    number,
    print_fields,
    print_json,
    print_message,
    print_warnings,
    result,
    unread_text,
)

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["run", "submit"]

EXIT_DETACHED = 130

Config = Annotated[
    Path, typer.Argument(help="Experiment file, or the folder of an experiment.yaml.")
]
ModelDir = Annotated[
    Path | None,
    typer.Argument(help="Directory with the model's code. Default: the experiment file's."),
]
Test = Annotated[
    bool, typer.Option("--test", help="Stop after one batch, one validation and one checkpoint.")
]


def run(
    config: Config,
    model_dir: ModelDir = None,
    test: Test = False,
    slots: Annotated[
        int | None, typer.Option(help="Slots of the agent, if this command starts it.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Train on CPU slots although there are GPUs.")
    ] = False,
    port: Port = None,
) -> None:
    """Run an experiment: start services, submit, show progress, print the result.

    Exit code 0 when it completed, 3 when it completed with failed trials, else 1. Ctrl-C leaves it
    running.
    Example: zerolab run examples/digits/experiment.yaml
    """
    from zerolab.cli.connection import connect, named_master
    from zerolab.cli.local.background import start_services
    from zerolab.cli.local.progress import watch
    from zerolab.cli.log_stream import exit_code
    from zerolab.paths import Home

    content, archive = _read(config, model_dir)
    home = Home.default()
    if named_master() is None:
        start_services(home, port=port, slots=slots, cpu=cpu, print_message=print_message)
    with connect(home) as client:
        experiment = client.create_experiment(content, archive, test=test)
        experiment_id = experiment["id"]
        print_message(f"experiment {experiment_id} is submitted")
        _print_waiting_reason(experiment)
        try:
            finished = watch(client, experiment_id)
        except KeyboardInterrupt:
            print_message(
                f"\ndetached: experiment {experiment_id} goes on; see it with "
                f"`zerolab experiment describe {experiment_id}`, "
                f"stop it with `zerolab experiment cancel {experiment_id}`"
            )
            raise typer.Exit(EXIT_DETACHED) from None
        _conclude(client, finished)
    if exit_code(finished):
        raise typer.Exit(exit_code(finished))


def submit(
    config: Config,
    model_dir: ModelDir = None,
    test: Test = False,
    paused: Annotated[
        bool, typer.Option("--paused", help="Do not start it; `experiment activate` does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the experiment as JSON.")] = False,
) -> None:
    """Submit an experiment to the server and print its id.

    Example: id=$(zerolab submit experiment.yaml)
    """
    from zerolab.cli.connection import connect

    content, archive = _read(config, model_dir)
    with connect() as client:
        experiment = client.create_experiment(content, archive, activate=not paused, test=test)
    if as_json:
        print_json(experiment)
        return
    print_message(f"experiment {experiment['id']}: {experiment['name']}")
    _print_waiting_reason(experiment)
    result(str(experiment["id"]))


def _print_waiting_reason(experiment: dict[str, Any]) -> None:
    print_warnings(experiment)
    if experiment["waiting_reason"]:
        print_message(f"experiment {experiment['id']} waits: {experiment['waiting_reason']}")


def _read(config: Path, model_dir: Path | None) -> tuple[dict[str, Any], bytes]:
    """Read and check an experiment and pack its model, before anything is started.

    Raises:
        ConfigError: With every problem of the experiment file and its engine file.
    """
    from zerolab.client.archive import pack
    from zerolab.config.experiment.model_source import FolderFiles
    from zerolab.config.files import experiment_file, read_yaml
    from zerolab.config.validation import check_experiment

    config = experiment_file(config)
    content = read_yaml(config)
    directory = model_dir or config.absolute().parent
    check_experiment(content, FolderFiles(directory), str(config))
    return content, pack(directory)


def _conclude(client: "Client", finished: dict[str, Any]) -> None:
    best = finished["best_trial_id"] and client.trial(finished["best_trial_id"])
    last = best or next(iter(client.trials(finished["id"], limit=1)), None)
    saved = client.best_checkpoint(finished["id"])
    checkpoint = checkpoint_text(saved, finished["metric"]) or (last and last["latest_checkpoint"])
    validation = None
    if best:
        position = f"at batch {best['best_steps']} of trial {best['id']}"
        validation = f"{finished['metric']} {number(finished['best_validation'])} {position}"
    error, problem = finished["error"] or (last and last["error"]), finished["result_problem"]
    warning = unread_text(finished)
    fruitless = finished["state"] == "COMPLETED" and problem
    print_fields(
        {
            "experiment": finished["id"],
            "state": end_state(finished),
            "error": ColoredText(str(error), "red") if finished["state"] == "ERROR" else None,
            "no result": ColoredText(str(problem), "yellow") if fruitless else None,
            "best validation": validation,
            "checkpoint": checkpoint,
            "note": saved["note"],
            "warning": warning and ColoredText(warning, "yellow"),
            "browse": client.login_link(),
        }
    )
    if problem:
        print_message(f"see `zerolab experiment logs {finished['id']}`")
