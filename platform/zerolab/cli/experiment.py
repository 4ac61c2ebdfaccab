"""``zerolab experiment``: what was submitted, and what becomes of it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFile, Paused, Values, read_changes
from zerolab.cli.connection import ExperimentId
from zerolab.cli.log_stream import AsJsonLines, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    ArchivedToo,
    AsJson,
    Toned,
    Yes,
    age,
    checkpoint_text,
    end_state,
    hparam_lines,
    number,
    print_fields,
    print_json,
    print_table,
    problem_lines,
    result,
    say,
    say_archived,
    say_warnings,
    waiting_lines,
)
from zerolab.cli.preview import preview
from zerolab.formatting import duration_text, size_text

__all__ = ["group"]

group = typer.Typer(
    help="Experiments: a searcher and its trials.", no_args_is_help=True, rich_markup_mode=None
)

group.command()(preview)

_DONE = {
    "pause": "is pausing: its runs checkpoint and give their slots back",
    "activate": "is active",
    "cancel": "is being canceled: its runs checkpoint first",
    "kill": "is being killed",
    "archive": "is archived",
    "unarchive": "is not archived any more",
}
_NOTHING_RAN = {"pause": "is paused", "cancel": "is canceled", "kill": "is killed"}


@group.command("list")
def list_experiments(
    state: Annotated[str | None, typer.Option(help="Only in this state: ACTIVE, ERROR...")] = None,
    name: Annotated[str | None, typer.Option(help="Only with this in the name.")] = None,
    sort: Annotated[str | None, typer.Option(help="Field to sort by; -field for descending.")] = (
        None
    ),
    limit: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    archived: ArchivedToo = False,
    as_json: AsJson = False,
) -> None:
    """List experiments, newest first.

    Example: zerolab experiment list --state ACTIVE
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        shown = None if archived else False
        found = client.experiments(state=state, name=name, sort=sort, limit=limit, archived=shown)
    if as_json:
        print_json(found)
        return
    say_archived(found, shown=archived)
    rows = [
        (
            one["id"],
            one["name"],
            _short_state(one),
            f"{100 * (one['progress'] or 0):.0f} %",
            one["num_trials"],
            number(one["best_validation"]),
            one["metric"],
            age(one["created_at"]),
        )
        for one in found
    ]
    columns = ["id", "name", "state", "done", "trials", "best", "metric", "age"]
    print_table(columns, rows, shortened={"name", "metric"})
    for line in [*waiting_lines("experiment", found), *problem_lines("experiment", found)]:
        result(line)


def _short_state(experiment: dict[str, Any]) -> Toned:
    """Return the state without what a stopping experiment ends as."""
    state = end_state(experiment)
    return Toned("STOPPING", state.tone) if state.startswith("STOPPING_") else state


@group.command()
def describe(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Show one experiment: state, searcher, best trial, and its error if it has one."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.experiment(experiment_id)
        trials = client.trials(experiment_id)
        kept, size = client.checkpoint_totals(experiment_id)
        saved = client.best_checkpoint(experiment_id)
    if as_json:
        print_json({**found, "trials": trials, "best_checkpoint": saved})
        return
    best = next((one for one in trials if one["id"] == found["best_trial_id"]), None)
    states = [one["state"] for one in trials]
    print_fields(
        {
            "experiment": f"{found['id']}: {found['name']}",
            "description": found["description"],
            "labels": ", ".join(found["labels"]),
            "notes": found["notes"],
            "state": end_state(found),
            "no result": found["result_problem"] if not found["error"] else None,
            "waits": found["waiting_reason"],
            "progress": f"{100 * (found['progress'] or 0):.0f} %",
            "searcher": _searcher_text(found),
            "trials": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)),
            "best validation": number(found["best_validation"]),
            "best trial": best and f"{best['id']}{' (failed)' if best['state'] == 'ERROR' else ''}",
            "started with": hparam_lines(best) if best else None,
            "best checkpoint": checkpoint_text(saved, found["metric"]),
            "note": saved["note"],
            "slot time": duration_text(sum(one["slot_seconds"] for one in trials)),
            "checkpoints": f"{kept} kept, {size_text(size)}" if kept else None,
            "created": found["created_at"],
            "ended": found["ended_at"],
            "error": found["error"],
        }
    )


def _searcher_text(experiment: dict[str, Any]) -> str:
    metric = experiment["metric"]
    return f"{experiment['searcher_name']}{f' on {metric}' if metric else ''}"


@group.command()
def logs(
    experiment_id: ExperimentId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the experiment has ended.")
    ] = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print what the ranks of all trials wrote.

    Example: zerolab experiment logs 1 --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs

    with connect() as client:
        wanted = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "experiment", experiment_id, wanted, follow=follow, as_json=as_json)


@group.command()
def metrics(
    experiment_id: ExperimentId,
    form: Annotated[str, typer.Option("--format", help="csv or ndjson.")] = "csv",
    output: Annotated[Path | None, typer.Option(help="File to write. Default: print.")] = None,
) -> None:
    """Export every point of every metric.

    Example: zerolab experiment metrics 1 --output m.csv
    """
    import sys

    from zerolab.cli.connection import connect

    with connect() as client:
        pieces = client.export_metrics(experiment_id, format=form)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        with output.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    say(f"written to {output}")


@group.command()
def wait(
    experiment_id: ExperimentId,
    timeout: Annotated[
        float | None, typer.Option(help="Give up after so many seconds, with exit code 124.")
    ] = None,
) -> None:
    """Wait for the end; prints the state.

    Exit code 0 when it is COMPLETED, 3 when it is COMPLETED with failed trials, else 1.
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import ENDED, exit_code, wait_for_end

    with connect() as client:
        found = wait_for_end(client, experiment_id, timeout)
    result(end_state(found))
    if found["state"] not in ENDED:
        raise typer.Exit(124)
    if exit_code(found):
        raise typer.Exit(exit_code(found))


@group.command()
def pause(experiment_id: ExperimentId) -> None:
    """Checkpoint the runs and free their slots, until it is activated again."""
    _act(experiment_id, "pause")


@group.command()
def activate(experiment_id: ExperimentId) -> None:
    """Let a paused experiment go on."""
    _act(experiment_id, "activate")


@group.command()
def cancel(experiment_id: ExperimentId) -> None:
    """Stop for good, after a checkpoint."""
    _act(experiment_id, "cancel")


@group.command()
def kill(experiment_id: ExperimentId) -> None:
    """Stop for good, now."""
    _act(experiment_id, "kill")


@group.command()
def archive(experiment_id: ExperimentId) -> None:
    """Put an ended experiment away: it leaves the lists, its data stays."""
    _act(experiment_id, "archive")


@group.command()
def unarchive(experiment_id: ExperimentId) -> None:
    """Bring an archived experiment back into the lists."""
    _act(experiment_id, "unarchive")


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
        made = client.experiment_action(experiment_id, "fork", changes)
    say_warnings(made)
    result(str(made["id"]))


@group.command("continue")
def continue_experiment(
    experiment_id: ExperimentId,
    config: ChangesFile = None,
    values: Values = None,
    paused: Paused = False,
) -> None:
    """Let an ended experiment go on from its checkpoints, with changes.

    Example: zerolab experiment continue 1 --set searcher.max_length.batches=2000
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        found = client.experiment_action(experiment_id, "continue", changes)
    say(f"experiment {experiment_id} goes on: it is {found['state']}")


@group.command()
def change(
    experiment_id: ExperimentId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    description: Annotated[str | None, typer.Option(help="New description.")] = None,
    notes: Annotated[str | None, typer.Option(help="New notes.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label; may be repeated; replaces all labels.")
    ] = None,
) -> None:
    """Change the name, description, notes or labels.

    Example: change 1 --label best
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    given = {"name": name, "description": description, "notes": notes, "labels": label}
    changes = {key: value for key, value in given.items() if value}
    if not changes:
        problem = "give at least one of --name, --description, --notes, --label"
        raise ConfigError("zerolab experiment change", [problem])
    with connect() as client:
        client.patch_experiment(experiment_id, **changes)
    say(f"experiment {experiment_id} is changed")


@group.command()
def delete(
    experiment_id: ExperimentId,
    yes: Yes = False,
) -> None:
    """Delete an ended experiment with its metrics, logs and checkpoints."""
    if not yes:
        text = f"Delete experiment {experiment_id} with its metrics, logs and checkpoints?"
        typer.confirm(text, abort=True, err=True)
    from zerolab.cli.connection import connect

    with connect() as client:
        client.delete_experiment(experiment_id)
    say(f"experiment {experiment_id} is deleted")


def _act(experiment_id: int, action: str) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.experiment(experiment_id)
        before, waited = found["state"], found["waiting_reason"] is not None
        state = client.experiment_action(experiment_id, action)["state"]
    told = _DONE[action]
    if state == "CANCELED" or (state == "PAUSED" and (waited or before == state)):
        told = _NOTHING_RAN.get(action, told)
    if action in {"cancel", "kill"} and before == state:
        ends = state.startswith("STOPPING")
        told = f"is ending already: it is {state}" if ends else f"has ended: it stays {state}"
    say(f"experiment {experiment_id} {told}")
