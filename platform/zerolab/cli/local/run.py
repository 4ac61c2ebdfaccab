"""Command ``zerolab run``: an experiment from its submission to its result."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.output import (
    ColoredText,
    Port,
    checkpoint_text,
    end_state,
    number,
    print_fields,
    print_message,
    unread_text,
)
from zerolab.cli.submit import Config, ModelDir, Test, print_waiting_reason, read_submission

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["run"]

EXIT_DETACHED = 130


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
    from zerolab.cli.log_stream import exit_code, wait_for_end
    from zerolab.paths import Home
    from zerolab.registry import PARTS

    content, archive = read_submission(config, model_dir)
    home = Home.default()
    if named_master() is None:
        start_services(home, port=port, slots=slots, cpu=cpu, print_message=print_message)
    with connect(home) as client:
        experiment = client.create_experiment(content, archive, test=test)
        experiment_id = experiment["id"]
        print_message(f"experiment {experiment_id} is submitted")
        print_waiting_reason(experiment)
        try:
            display = PARTS.find("live_progress")
            wait = display.watch if display else wait_for_end
            finished = wait(client, experiment_id)
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
