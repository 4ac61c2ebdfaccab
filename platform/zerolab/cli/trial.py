"""``zerolab trial``: one choice of hyperparameters."""

from typing import Annotated, Any

import typer

from zerolab.cli.following import AsJsonLines, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    AsJson,
    end_state,
    number,
    print_fields,
    print_json,
    print_table,
    problem_lines,
    result,
    say,
)

__all__ = ["group"]

group = typer.Typer(help="Trials of an experiment.", no_args_is_help=True, rich_markup_mode=None)

TrialId = Annotated[int, typer.Argument(help="Id of the trial.")]

_NAMED_TRIALS = 8


@group.command("list")
def list_trials(
    experiment_id: Annotated[int, typer.Argument(help="Id of the experiment.")],
    as_json: AsJson = False,
) -> None:
    """List an experiment's trials.

    Example: zerolab trial list 1
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        trials = client.trials(experiment_id)
    if as_json:
        print_json(trials)
        return
    columns = ["id", "state", "batches", "best validation", "latest", "restarts", "checkpoint"]
    rows = [
        (
            one["id"],
            end_state(one),
            one["steps_completed"],
            number(one["best_validation"]),
            number(one["latest_validation"]),
            one["restarts"],
            one["best_checkpoint"] or one["latest_checkpoint"],
        )
        for one in trials
    ]
    print_table(columns, rows)
    for line in [*_waits(trials), *problem_lines("trial", trials)]:
        result(line)


def _waits(trials: list[dict[str, Any]]) -> list[str]:
    """Say why trials wait, one line for each reason."""
    by_reason: dict[str, list[int]] = {}
    for one in trials:
        if one["waiting_reason"]:
            by_reason.setdefault(one["waiting_reason"], []).append(one["id"])
    lines = []
    for reason, ids in by_reason.items():
        more = f" and {len(ids) - _NAMED_TRIALS} more" if len(ids) > _NAMED_TRIALS else ""
        named = ", ".join(map(str, ids[:_NAMED_TRIALS])) + more
        lines.append(f"trial {named} waits: {reason}")
    return lines


@group.command()
def describe(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Show one trial: state, hyperparameters, validations, checkpoints."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.trial(trial_id)
    if as_json:
        print_json(found)
        return
    hparams = "\n".join(f"{name}: {value}" for name, value in sorted(found["hparams"].items()))
    print_fields(
        {
            "trial": f"{found['id']} of experiment {found['experiment_id']}",
            "state": end_state(found),
            "no result": found["result_problem"] if not found["error"] else None,
            "waits": found["waiting_reason"],
            "batches": found["steps_completed"],
            "best validation": number(found["best_validation"]),
            "at batch": found["best_steps"],
            "latest": number(found["latest_validation"]),
            "restarts": found["restarts"],
            "seed": found["seed"],
            "hyperparameters": hparams,
            "best checkpoint": found["best_checkpoint"],
            "latest checkpoint": found["latest_checkpoint"],
            "created": found["created_at"],
            "ended": found["ended_at"],
            "error": found["error"],
        }
    )


@group.command()
def logs(
    trial_id: TrialId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the trial has ended.")
    ] = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print what a trial's ranks wrote.

    Example: zerolab trial logs 3 --rank 0 --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.following import LogFilter, print_logs

    with connect() as client:
        wanted = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "trial", trial_id, wanted, follow=follow, as_json=as_json)


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
    """Print a trial's curves, a point a line.

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
def kill(trial_id: TrialId) -> None:
    """Stop one trial now; the experiment goes on without it."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.kill_trial(trial_id)
    say(f"trial {trial_id} is being stopped")
