"""Command group ``zerolab experiment``."""

from typing import Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFile, Paused, Values, read_changes
from zerolab.cli.connection import ExperimentId
from zerolab.cli.groups import command_group
from zerolab.cli.log_stream import AsJsonLines, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    ArchivedToo,
    AsJson,
    ColoredText,
    age,
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
    unread_text,
    waiting_lines,
)
from zerolab.formatting import duration_text, size_text

__all__ = ["group"]

group = command_group("Experiments: a searcher and its trials.")

_DONE = {
    "pause": "is pausing: its runs checkpoint and give their slots back",
    "activate": "is active",
    "cancel": "is being canceled: its runs checkpoint first",
    "kill": "is being killed",
}
_NOTHING_RAN = {"pause": "is paused", "cancel": "is canceled", "kill": "is killed"}


@group.command("list")
def list_experiments(
    state: Annotated[str | None, typer.Option(help="Only in this state: ACTIVE, ERROR...")] = None,
    name: Annotated[str | None, typer.Option(help="Only with this in the name.")] = None,
    sort: Annotated[str | None, typer.Option(help="Field to sort by; -field for descending.")] = (
        None
    ),
    limit: Annotated[int | None, typer.Option(help="Maximum number to list.")] = None,
    archived: ArchivedToo = False,
    as_json: AsJson = False,
) -> None:
    """List experiments, newest first.

    Example: zerolab experiment list --state ACTIVE
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        shown = None if archived else False
        experiments = client.experiments(
            state=state, name=name, sort=sort, limit=limit, archived=shown
        )
    if as_json:
        print_json(experiments)
        return
    print_archived_hint(experiments, shown=archived)
    rows = [
        (
            experiment["id"],
            experiment["name"],
            _short_state(experiment),
            f"{100 * (experiment['progress'] or 0):.0f} %",
            experiment["num_trials"],
            number(experiment["best_validation"]),
            experiment["metric"],
            age(experiment["created_at"]),
        )
        for experiment in experiments
    ]
    columns = ["id", "name", "state", "done", "trials", "best", "metric", "age"]
    print_table(columns, rows, shortened={"name", "metric"})
    for line in [
        *waiting_lines("experiment", experiments),
        *problem_lines("experiment", experiments),
    ]:
        result(line)


def _short_state(experiment: dict[str, Any]) -> ColoredText:
    """Return the state without the final state of a stopping experiment."""
    state = end_state(experiment)
    return ColoredText("STOPPING", state.tone) if state.startswith("STOPPING_") else state


@group.command()
def describe(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Show one experiment: state, searcher, best trial, and its error if it has one."""
    from zerolab.cli.connection import connect

    with connect() as client:
        experiment = client.experiment(experiment_id)
        trials = client.trials(experiment_id)
        count, size = client.checkpoint_totals(experiment_id)
        saved = client.best_checkpoint(experiment_id)
    if as_json:
        print_json({**experiment, "trials": trials, "best_checkpoint": saved})
        return
    best = next((trial for trial in trials if trial["id"] == experiment["best_trial_id"]), None)
    states = [trial["state"] for trial in trials]
    print_fields(
        {
            "experiment": f"{experiment['id']}: {experiment['name']}",
            "description": experiment["description"],
            "labels": ", ".join(experiment["labels"]),
            "notes": experiment["notes"],
            "state": end_state(experiment),
            "no result": experiment["result_problem"] if not experiment["error"] else None,
            "waits": experiment["waiting_reason"],
            "progress": f"{100 * (experiment['progress'] or 0):.0f} %",
            "searcher": _searcher_text(experiment),
            "trials": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)),
            "best validation": number(experiment["best_validation"]),
            "best trial": best and f"{best['id']}{' (failed)' if best['state'] == 'ERROR' else ''}",
            "started with": hparam_lines(best) if best else None,
            "best checkpoint": checkpoint_text(saved, experiment["metric"]),
            "note": saved["note"],
            "warning": unread_text(experiment),
            "slot time": duration_text(sum(trial["slot_seconds"] for trial in trials)),
            "checkpoints": f"{count} kept, {size_text(size)}" if count else None,
            "created": experiment["created_at"],
            "ended": experiment["ended_at"],
            "error": experiment["error"],
        }
    )


def _searcher_text(experiment: dict[str, Any]) -> str:
    metric = experiment["metric"]
    return f"{experiment['searcher_name']}{f' on {metric}' if metric else ''}"


@group.command()
def logs(
    experiment_id: ExperimentId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the experiment has ended.")
    ] = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of all trials.

    Example: zerolab experiment logs 1 --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs

    with connect() as client:
        log_filter = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "experiment", experiment_id, log_filter, follow=follow, as_json=as_json)


@group.command()
def wait(
    experiment_id: ExperimentId,
    timeout: Annotated[
        float | None, typer.Option(help="Timeout in seconds, with exit code 124.")
    ] = None,
) -> None:
    """Wait for the end; prints the state.

    Exit code 0 when it is COMPLETED, 3 when it is COMPLETED with failed trials, else 1.
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import ENDED, exit_code, wait_for_end

    with connect() as client:
        experiment = wait_for_end(client, experiment_id, timeout)
    result(end_state(experiment))
    if experiment["state"] not in ENDED:
        raise typer.Exit(124)
    if exit_code(experiment):
        raise typer.Exit(exit_code(experiment))


@group.command()
def pause(experiment_id: ExperimentId) -> None:
    """Checkpoint the runs and free their slots, until it is activated again."""
    _run_action(experiment_id, "pause")


@group.command()
def activate(experiment_id: ExperimentId) -> None:
    """Continue a paused experiment."""
    _run_action(experiment_id, "activate")


@group.command()
def cancel(experiment_id: ExperimentId) -> None:
    """Stop an experiment after a checkpoint."""
    _run_action(experiment_id, "cancel")


@group.command()
def kill(experiment_id: ExperimentId) -> None:
    """Stop an experiment immediately."""
    _run_action(experiment_id, "kill")


@group.command()
def fork(
    experiment_id: ExperimentId,
    config: ChangesFile = None,
    values: Values = None,
    paused: Paused = False,
) -> None:
    """Submit the same files again as a new experiment, with changes; prints its id.

    Example: zerolab experiment fork 1 --set searcher.max_trials=16
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        new_experiment = client.experiment_action(experiment_id, "fork", changes)
    print_warnings(new_experiment)
    result(str(new_experiment["id"]))


def _run_action(experiment_id: int, action: str) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        experiment = client.experiment(experiment_id)
        before, waited = experiment["state"], experiment["waiting_reason"] is not None
        state = client.experiment_action(experiment_id, action)["state"]
    message = _DONE[action]
    if state == "CANCELED" or (state == "PAUSED" and (waited or before == state)):
        message = _NOTHING_RAN.get(action, message)
    if action in {"cancel", "kill"} and before == state:
        ends = state.startswith("STOPPING")
        message = f"is ending already: it is {state}" if ends else f"has ended: it stays {state}"
    print_message(f"experiment {experiment_id} {message}")
