"""Command ``zerolab run``: an experiment from its submission to its result."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFiles, Values
from zerolab.cli.connection import InProject
from zerolab.cli.output import (
    AsJson,
    ColoredText,
    Port,
    checkpoint_text,
    end_state,
    number,
    print_fields,
    print_json,
    print_message,
    unread_text,
)
from zerolab.cli.submit import (
    AsWandb,
    Config,
    ModelDir,
    Test,
    print_waiting_reason,
    read_submission,
)

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["run"]

EXIT_DETACHED = 130


def run(
    config: Config,
    model_dir: ModelDir = None,
    changes: ChangesFiles = None,
    values: Values = None,
    project: InProject = None,
    test: Test = False,
    slots: Annotated[
        int | None, typer.Option(help="Slots of the agent, if this command starts one.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use CPU slots even if there are GPUs.")
    ] = False,
    port: Port = None,
    as_wandb: AsWandb = False,
    as_json: AsJson = False,
) -> None:
    """Train an experiment, show its progress, and print the result.

    Starts a server if none is running, and an agent if none is connected. Ctrl-C stops watching;
    the experiment continues. Exit code: 0 if it completed, 3 if it completed and some trials
    failed, else 1.

    Example: zerolab run my-project
    zerolab run examples/digits/experiment.yaml --test
    zerolab run my-project --set searcher.max_length.epochs=3
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.local.background import start_services
    from zerolab.cli.log_stream import exit_code, wait_for_end
    from zerolab.paths import Home, named_master
    from zerolab.registry import PARTS

    content, archive = read_submission(
        config, model_dir, changes, values, project, as_wandb=as_wandb
    )
    home = Home.default()
    if named_master() is None:
        start_services(
            home, port=port, slots=slots, cpu=cpu, agent=None, print_message=print_message
        )
    with connect(home) as client:
        experiment = client.create_experiment(content, archive, test=test)
        experiment_id = experiment["id"]
        print_message(f"submitted experiment {experiment_id} ({experiment['name']})")
        print_waiting_reason(experiment)
        print_message(f"live charts: {client.login_link()}")
        try:
            display = PARTS.find("live_progress")
            wait = display.watch if display else wait_for_end
            finished = wait(client, experiment_id)
        except KeyboardInterrupt:
            print_message(
                f"\nexperiment {experiment_id} continues in the background; "
                f"show it with `zerolab experiment describe {experiment_id}`, "
                f"stop it with `zerolab experiment cancel {experiment_id}`"
            )
            raise typer.Exit(EXIT_DETACHED) from None
        if as_json:
            print_json({**finished, "best_checkpoint": client.best_checkpoint(experiment_id)})
        else:
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
    next_steps = {f"zerolab logs {finished['id']}": "print the logs"} if problem else {}
    next_steps["zerolab open"] = "open the charts in a browser"
    if saved["checkpoint"]:
        uuid = saved["checkpoint"]["uuid"][:8]
        next_steps[f"zerolab checkpoint download {uuid} best/"] = "get the best weights"
    width = max(map(len, next_steps))
    print_message("next:")
    for command, purpose in next_steps.items():
        print_message(f"  {command:<{width}}  # {purpose}")
