"""Command group ``zerolab experiment``."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFiles, Paused, Values, read_changes
from zerolab.cli.connection import (
    ExperimentId,
    OfState,
    complete_from,
    complete_project,
    id_argument,
    id_option,
)
from zerolab.cli.groups import command_group
from zerolab.cli.log_stream import AsJsonLines, Follow, OfLevel, OfRank, Tail
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
    print_done,
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

__all__ = ["all_logs", "group", "ps"]

group = command_group("List, inspect and control experiments.", panel="Results")

_INSPECT, _CONTROL = "Inspect", "Control"

_SORT_FIELDS = ("id", "name", "state", "progress", "best_validation", "num_trials")
_GROUP_FIELDS = ("user", "project", "label", "state", "pool", "searcher")
_NOT_ENDED = (
    "ACTIVE", "PAUSED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_COMPLETED",
    "STOPPING_ERROR",
)  # fmt: skip

_DONE = {
    "pause": "is pausing: its runs save a checkpoint and release their slots",
    "activate": "is active",
    "cancel": "is stopping: its runs save a checkpoint first",
    "kill": "is being killed",
}
_NOTHING_RAN = {"pause": "is paused", "cancel": "is canceled", "kill": "is killed"}


@group.command("list", rich_help_panel=_INSPECT)
def list_experiments(
    state: OfState = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List only experiments whose name contains this text."),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List only experiments of this user."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="List only experiments of this project.",
            autocompletion=complete_project,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Field to sort by, such as best_validation; -FIELD sorts in descending order.",
            autocompletion=complete_from(*_SORT_FIELDS, *(f"-{name}" for name in _SORT_FIELDS)),
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number to list.")] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Show one line for each value of user, project, label, state, pool, searcher or "
            "a key of the configuration, such as hyperparameters.lr.",
            autocompletion=complete_from(*_GROUP_FIELDS),
        ),
    ] = None,
    archived: ArchivedToo = False,
    as_json: AsJson = False,
) -> None:
    """List experiments, newest first.

    Example: zerolab experiment list --state ACTIVE
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    if group_by is not None and (sort is not None or limit is not None):
        problem = "--group-by: lists all groups; leave out --sort and --limit"
        raise ConfigError("experiment list", [problem])
    with connect() as client:
        shown = None if archived else False
        if group_by is not None:
            groups = client.experiment_groups(
                group_by, state=state, name=name, user=user, project=project, archived=shown
            )
            _print_groups(group_by, groups, as_json=as_json)
            return
        experiments = client.experiments(
            state=state, name=name, user=user, project=project, sort=sort, limit=limit,
            archived=shown,
        )  # fmt: skip
    if as_json:
        print_json(experiments)
        return
    print_archived_hint(experiments, shown=archived)
    _print_experiments(experiments)


def _print_groups(group_by: str, groups: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print one line for each group of experiments."""
    if as_json:
        print_json(groups)
        return
    rows = []
    for group in groups:
        first = group["best"][0] if group["best"] else None
        text = f"{number(first['value'])} {first['metric']}" if first else "-"
        rows.append(
            (
                "-" if group["value"] is None else group["value"],
                group["experiments"],
                group["unfinished"],
                group["failed"],
                text,
                first["experiment_id"] if first else "-",
            )
        )
    columns = [group_by, "experiments", "unfinished", "failed", "best", "experiment"]
    print_table(columns, rows)


def ps(
    all_states: Annotated[
        bool, typer.Option("--all", "-a", help="Include experiments that have ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the experiments that run, wait or are paused.

    Example: zerolab ps
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        states: tuple[str | None, ...] = (None,) if all_states else _NOT_ENDED
        found = [client.experiments(state=state, archived=False) for state in states]
    experiments = sorted((item for group in found for item in group), key=lambda item: -item["id"])
    if as_json:
        print_json(experiments)
    elif experiments:
        _print_experiments(experiments)
    else:
        print_message("no experiment is running; `zerolab experiment list` lists all")


def _print_experiments(experiments: Sequence[dict[str, Any]]) -> None:
    extra = [key for key in ("owner", "project") if any(item.get(key) for item in experiments)]
    rows = [
        (
            experiment["id"],
            experiment["name"] + (" (test)" if experiment.get("test_mode") else ""),
            *(experiment[key] for key in extra),
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
    columns[2:2] = extra
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


@group.command(rich_help_panel=_INSPECT)
def describe(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Show one experiment: state, progress, best trial, error.

    Example: zerolab experiment describe 1
    """
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
            "owner": experiment.get("owner"),
            "project": experiment.get("project"),
            "description": experiment["description"],
            "labels": ", ".join(experiment["labels"]),
            "notes": experiment["notes"],
            "state": end_state(experiment),
            "no result": experiment["result_problem"] if not experiment["error"] else None,
            "waits": experiment["waiting_reason"],
            "progress": f"{100 * (experiment['progress'] or 0):.0f} %",
            "searcher": _searcher_text(experiment),
            "trials": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)),
            "restarts": sum(trial["restarts"] for trial in trials) or None,
            "best validation": best and _best_text(experiment, best),
            "hyperparameters": hparam_lines(best) if best else None,
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


def _best_text(experiment: dict[str, Any], best: dict[str, Any]) -> str:
    value = f"{experiment['metric']} {number(experiment['best_validation'])}"
    failed = " (failed)" if best["state"] == "ERROR" else ""
    return f"{value} at batch {best['best_steps']} of trial {best['id']}{failed}"


def _searcher_text(experiment: dict[str, Any]) -> str:
    metric = experiment["metric"]
    return f"{experiment['searcher_name']}{f' on {metric}' if metric else ''}"


@group.command(rich_help_panel=_INSPECT)
def logs(
    experiment_id: ExperimentId,
    follow: Follow = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of all trials of an experiment.

    Example: zerolab experiment logs 1 --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs

    with connect() as client:
        log_filter = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "experiment", experiment_id, log_filter, follow=follow, as_json=as_json)


def all_logs(
    experiment_id: Annotated[
        int | None, id_argument("experiment", "Id of the experiment. Default: the newest one.")
    ] = None,
    trial: Annotated[
        int | None, id_option("trial", "--trial", "-t", text="Print the logs of this trial only.")
    ] = None,
    follow: Follow = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of an experiment or a trial.

    Example: zerolab logs 1 --follow
    zerolab logs --trial 3 --level ERROR
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs
    from zerolab.errors import ConfigError, NotFoundError

    if experiment_id is not None and trial is not None:
        raise ConfigError("logs", ["give an experiment or --trial, not both"])
    log_filter = LogFilter(rank=rank, level=level, tail=tail)
    with connect() as client:
        if trial is not None:
            print_logs(client, "trial", trial, log_filter, follow=follow, as_json=as_json)
            return
        if experiment_id is None:
            newest = client.experiments(limit=1)
            if not newest:
                raise NotFoundError("there are no experiments; `zerolab run FILE` starts one")
            experiment_id = newest[0]["id"]
        print_logs(client, "experiment", experiment_id, log_filter, follow=follow, as_json=as_json)


@group.command(rich_help_panel=_INSPECT)
def wait(
    experiment_id: ExperimentId,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Stop waiting after this time, with exit code 124."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until an experiment has ended, and print its state.

    Exit code: 0 if it is COMPLETED, 3 if it is COMPLETED and some trials failed, else 1.

    Example: zerolab experiment wait 1 --timeout 3600
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import ENDED, exit_code, wait_for_end

    with connect() as client:
        experiment = wait_for_end(client, experiment_id, timeout)
    if as_json:
        print_json(experiment)
    else:
        result(end_state(experiment))
    if experiment["state"] not in ENDED:
        raise typer.Exit(124)
    if exit_code(experiment):
        raise typer.Exit(exit_code(experiment))


@group.command(rich_help_panel=_CONTROL)
def pause(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Save checkpoints and free the slots until you activate it.

    Example: zerolab experiment pause 7
    """
    _run_action(experiment_id, "pause", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def activate(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Resume a paused experiment.

    Example: zerolab experiment activate 7
    """
    _run_action(experiment_id, "activate", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def cancel(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Stop an experiment after a last checkpoint.

    Example: zerolab experiment cancel 7
    """
    _run_action(experiment_id, "cancel", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def kill(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Stop an experiment at once, without a checkpoint.

    Example: zerolab experiment kill 7
    """
    _run_action(experiment_id, "kill", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def fork(
    experiment_id: ExperimentId,
    config: ChangesFiles = None,
    values: Values = None,
    paused: Paused = False,
    as_json: AsJson = False,
) -> None:
    """Submit the same files as a new experiment, and print its id.

    It trains from the beginning. To train an ended experiment for longer, use `continue`.

    Example: zerolab experiment fork 1 --set searcher.max_trials=16
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        new_experiment = client.experiment_action(experiment_id, "fork", changes)
    print_warnings(new_experiment)
    if as_json:
        print_json(new_experiment)
    else:
        result(str(new_experiment["id"]))


def _run_action(experiment_id: int, action: str, *, as_json: bool) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        experiment = client.experiment(experiment_id)
        before, waited = experiment["state"], experiment["waiting_reason"] is not None
        changed = client.experiment_action(experiment_id, action)
    state = changed["state"]
    message = _DONE[action]
    if state == "CANCELED" or (state == "PAUSED" and (waited or before == state)):
        message = _NOTHING_RAN.get(action, message)
    if action in {"cancel", "kill"} and before == state:
        ends = state.startswith("STOPPING")
        message = f"is stopping already: {state}" if ends else f"has already ended: {state}"
    print_done(changed, f"experiment {experiment_id} {message}", as_json=as_json)
