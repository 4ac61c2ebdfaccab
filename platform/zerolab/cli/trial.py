"""Command group ``zerolab trial``."""

from typing import Annotated

import typer

from zerolab.cli.config_overrides import ChangesFile, Paused, Values, read_changes
from zerolab.cli.connection import ExperimentId, TrialId
from zerolab.cli.groups import command_group
from zerolab.cli.log_stream import AsJsonLines, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    ArchivedToo,
    AsJson,
    checkpoint_text,
    end_state,
    hparam_lines,
    number,
    print_archived_hint,
    print_fields,
    print_json,
    print_message,
    print_table,
    print_warnings,
    problem_lines,
    result,
    waiting_lines,
)
from zerolab.formatting import duration_text

__all__ = ["group"]

group = command_group("Trials of an experiment.")


@group.command("list")
def list_trials(
    experiment_id: ExperimentId,
    sort: Annotated[
        str,
        typer.Option(
            help="metric (the best first), a hyperparameter, or a field such as slot_seconds; "
            "-NAME for the largest first."
        ),
    ] = "id",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number to list.")] = None,
    archived: ArchivedToo = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """List an experiment's trials with their hyperparameters.

    Example: zerolab trial list 1 --sort metric --limit 10
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.trial_table import column_of, csv_lines, print_trials
    from zerolab.errors import ConfigError

    if as_csv and as_json:
        raise ConfigError("zerolab trial list", ["give --csv or --json, not both"])
    with connect() as client:
        shown = None if archived else False
        trials = client.trials(experiment_id, sort=column_of(sort), limit=limit, archived=shown)
    if as_json:
        print_json(trials)
    elif as_csv:
        result(csv_lines(trials).rstrip("\r\n"))
    else:
        print_archived_hint(trials, shown=archived)
        print_trials(trials)
        for line in [*waiting_lines("trial", trials), *problem_lines("trial", trials)]:
            result(line)


@group.command()
def describe(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Show one trial: state, hyperparameters, validations, checkpoints."""
    from zerolab.cli.connection import connect

    with connect() as client:
        trial = client.trial(trial_id)
        if as_json:
            print_json(trial)
            return
        metric = client.experiment(trial["experiment_id"])["metric"]
        saved = client.trial_best_checkpoint(trial_id)
    print_fields(
        {
            "trial": f"{trial['id']} of experiment {trial['experiment_id']}",
            "state": end_state(trial),
            "no result": trial["result_problem"] if not trial["error"] else None,
            "waits": trial["waiting_reason"],
            "batches": trial["steps_completed"],
            "best validation": number(trial["best_validation"]),
            "at batch": trial["best_steps"],
            "latest": number(trial["latest_validation"]),
            "restarts": trial["restarts"],
            "slot time": duration_text(trial["slot_seconds"]),
            "seed": trial["seed"],
            "hyperparameters": hparam_lines(trial),
            "best checkpoint": checkpoint_text(saved, metric),
            "note": saved["note"],
            "latest checkpoint": trial["latest_checkpoint"],
            "created": trial["created_at"],
            "ended": trial["ended_at"],
            "error": trial["error"],
        }
    )


@group.command()
def logs(
    trial_id: TrialId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the trial has ended.")
    ] = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of a trial.

    Example: zerolab trial logs 3 --rank 0 --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs

    with connect() as client:
        log_filter = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "trial", trial_id, log_filter, follow=follow, as_json=as_json)


@group.command()
def metrics(
    trial_id: TrialId,
    kind: Annotated[
        str | None, typer.Option("--group", help="training, validation or system.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only this metric; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a trial's curves, one point per line.

    Example: zerolab trial metrics 3 --name loss
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        curves = client.metrics(trial_id, kind, name or ())
    if as_json:
        print_json(curves)
        return
    rows = [
        (curve["group"], curve["name"], step, number(value, 6))
        for curve in curves
        for step, value in curve["points"]
    ]
    print_table(["group", "metric", "batch", "value"], rows)


@group.command()
def pause(trial_id: TrialId) -> None:
    """Checkpoint one trial and free its slots, until it is activated again."""
    _run_action(trial_id, "pause", "is pausing: it checkpoints and gives its slots back")


@group.command()
def activate(trial_id: TrialId) -> None:
    """Continue a paused trial."""
    _run_action(trial_id, "activate", "waits for its slots")


@group.command()
def cancel(trial_id: TrialId) -> None:
    """Stop a trial after a checkpoint; the experiment continues without it."""
    _run_action(trial_id, "cancel", "is being canceled: it checkpoints first")


@group.command()
def kill(trial_id: TrialId) -> None:
    """Stop a trial immediately; the experiment continues without it."""
    _run_action(trial_id, "kill", "is being stopped")


@group.command("continue")
def continue_trial(trial_id: TrialId) -> None:
    """Continue a failed or stopped trial from its checkpoint."""
    _run_action(trial_id, "continue", "goes on")


@group.command()
def fork(
    trial_id: TrialId, config: ChangesFile = None, values: Values = None, paused: Paused = False
) -> None:
    """Submit a trial as a new experiment that starts with its weights; prints the id.

    Example: zerolab trial fork 3 --set searcher.max_length.epochs=5
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        experiment = client.trial_action(trial_id, "fork", changes)
    print_warnings(experiment)
    result(str(experiment["id"]))


_NOTHING_RAN = {
    ("pause", "PAUSED"): "is paused",
    ("cancel", "CANCELED"): "is canceled",
    ("kill", "CANCELED"): "is stopped",
}
"""Message of an action on a trial without slots, by the action and the state after it."""


def _run_action(trial_id: int, action: str, done: str) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        before = client.trial(trial_id)["state"]
        state = client.trial_action(trial_id, action)["state"]
    has_ended = before == state and state in {"COMPLETED", "CANCELED", "ERROR"}
    if has_ended:
        done = f"has ended: it stays {state}"
    elif (action, state) in _NOTHING_RAN:
        done = _NOTHING_RAN[action, state]
    print_message(f"trial {trial_id} {done}")
