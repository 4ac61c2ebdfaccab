"""Command group ``zerolab trial``."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.config_overrides import ChangesFiles, Paused, Values, read_changes
from zerolab.cli.connection import (
    ExperimentId,
    TrialId,
    complete_from,
    complete_from_server,
    completed_id,
)
from zerolab.cli.groups import command_group
from zerolab.cli.log_stream import AsJsonLines, Follow, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    LENGTHS,
    ArchivedToo,
    AsJson,
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
    removed_values,
    result,
    waiting_lines,
)
from zerolab.formatting import duration_text

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["group"]

group = command_group("List, inspect and control the trials of an experiment.", panel="Results")

_INSPECT, _CONTROL = "Inspect", "Control"
_SHOWN_RUNS = 10


def _sort_names(client: "Client", context: typer.Context) -> Iterable[tuple[object, str]]:
    from zerolab.cli.trial_table import FIELDS
    from zerolab.contract.flatten import flatten_hparams

    yield from ((name, "") for name in ("metric", *FIELDS))
    experiment_id = completed_id(context)
    for trial in client.trials(experiment_id, limit=1) if experiment_id else ():
        yield from ((name, "hyperparameter") for name in flatten_hparams(trial["hparams"]))


def _sort_columns(client: "Client", experiment_id: int) -> list[tuple[str, str]]:
    """Return the hyperparameters and metrics of the first trial, with the columns of each."""
    from zerolab.contract.flatten import flatten_hparams

    columns: list[tuple[str, str]] = []
    for trial in client.trials(experiment_id, limit=1):
        for name in flatten_hparams(trial["hparams"]):
            columns += [(name, name), (name.rpartition(".")[2], name)]
        for metric in client.metric_names(trial["id"]):
            columns.append((metric["name"], f"last.{metric['group']}.{metric['name']}"))
    return columns


def _metric_names(client: "Client", context: typer.Context) -> Iterable[tuple[object, str]]:
    trial_id = completed_id(context)
    for metric in client.metric_names(trial_id) if trial_id else ():
        yield metric["name"], metric["group"]


@group.command("list", rich_help_panel=_INSPECT)
def list_trials(
    experiment_id: ExperimentId,
    sort: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Sort by metric (best first), a hyperparameter, or a field such as slot_seconds; "
            "-NAME sorts in descending order.",
            autocompletion=complete_from_server(_sort_names),
        ),
    ] = "id",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number to list.")] = None,
    archived: ArchivedToo = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV with all fields and hyperparameters.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the trials of an experiment with their hyperparameters.

    Example: zerolab trial list 1 --sort metric --limit 10
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.trial_table import column_of, csv_lines, print_trials, sort_problem
    from zerolab.errors import ConfigError

    if as_csv and as_json:
        raise ConfigError("trial list", ["give --csv or --json, not both"])
    with connect() as client:
        shown = None if archived else False
        try:
            trials = client.trials(experiment_id, sort=column_of(sort), limit=limit, archived=shown)
        except ConfigError as error:
            if not error.problems[0].startswith("sort: "):
                raise
            metric = client.experiment(experiment_id)["metric"]
            columns = _sort_columns(client, experiment_id)
            problem = sort_problem(sort, metric, columns)
            raise ConfigError("trial list", [problem]) from None
    if as_json:
        print_json(trials)
    elif as_csv:
        result(csv_lines(trials).rstrip("\r\n"))
    else:
        print_archived_hint(trials, shown=archived)
        print_trials(trials)
        for line in [*waiting_lines("trial", trials), *problem_lines("trial", trials)]:
            result(line)


@group.command(rich_help_panel=_INSPECT)
def describe(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Show one trial: state, hyperparameters, validation, checkpoints, and its runs.

    A run is one execution of the trial. A trial that was restarted, preempted or paused has
    several.

    Example: zerolab trial describe 3
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        trial = client.trial(trial_id)
        runs = client.runs(trial_id)
        if as_json:
            print_json({**trial, "runs": runs})
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
            "best validation": _validation_text(
                metric, trial["best_validation"], trial["best_steps"]
            ),
            "latest": _validation_text(metric, trial["latest_validation"]),
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
            "runs": "\n".join(_run_lines(runs)),
        }
    )


def _validation_text(metric: str | None, value: object, steps: int | None = None) -> str | None:
    if value is None:
        return None
    position = "" if steps is None else f" at batch {steps}"
    return f"{metric} {number(value)}{position}"


def _run_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the latest runs of a trial, one per line."""
    omitted = len(runs) - _SHOWN_RUNS
    lines = [f"{omitted} earlier; --json lists all"] if omitted > 0 else []
    for run in runs[-_SHOWN_RUNS:]:
        start = datetime.fromisoformat(run["started_at"] or run["created_at"])
        end = run["ended_at"] and datetime.fromisoformat(run["ended_at"])
        parts = [
            f"run {run['id']} on {', '.join(run['agents']) or 'a deleted agent'}",
            f"from {start:%Y-%m-%d %H:%M:%S} UTC",
            duration_text(((end or datetime.now(UTC)) - start).total_seconds()),
            run["reason"] or _end_text(run),
        ]
        lines.append("  ".join(parts))
    return lines


def _end_text(run: Mapping[str, Any]) -> str:
    if run["state"] != "EXITED":
        return str(run["state"]).lower()
    if run["exit_code"] is None:
        return "exit code unknown"
    return "finished" if run["exit_code"] == 0 else f"exit code {run['exit_code']}"


@group.command(rich_help_panel=_INSPECT)
def logs(
    trial_id: TrialId,
    follow: Follow = False,
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


@group.command(rich_help_panel=_INSPECT)
def metrics(
    trial_id: TrialId,
    kind: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Print only metrics of this group: training, validation or system.",
            autocompletion=complete_from("training", "validation", "system"),
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Print only this metric. May be repeated.",
            autocompletion=complete_from_server(_metric_names),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the metrics of a trial, one value per line.

    A curve of more than 1,000 values is averaged down to 1,000. `zerolab experiment metrics`
    exports every value. `--name epochs` prints the epochs at each validation.

    Example: zerolab trial metrics 3 --name loss
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        curves = client.metrics(trial_id, kind, name or ())
        if len({curve["name"] for curve in curves}) < len(set(name or ())) or (kind and not curves):
            _check_metrics(client.metric_names(trial_id), kind, name or ())
        experiment = None
        if any(curve["values_removed"] for curve in curves):
            experiment = client.experiment(client.trial(trial_id)["experiment_id"])
    if as_json:
        print_json(curves)
        return
    if not curves:
        print_message(f"trial {trial_id} has reported no metrics yet")
        return
    hidden = LENGTHS - set(name or ())
    rows = [
        (curve["group"], curve["name"], step, number(value, 6))
        for curve in curves
        if curve["group"] != "validation" or curve["name"] not in hidden
        for step, value in curve["points"]
    ]
    print_table(["group", "metric", "batch", "value"], rows)
    if experiment is not None:
        print_message(removed_values(experiment))


def _check_metrics(
    metrics: list[dict[str, Any]], group_name: str | None, names: Sequence[str]
) -> None:
    """Check that a trial has reported the metrics of a group and of names.

    Raises:
        ConfigError: With every unknown name, and the known ones.
    """
    from zerolab.errors import ConfigError
    from zerolab.schema.section import suggest

    known = {"--group": dict.fromkeys(metric["group"] for metric in metrics)}
    known["--name"] = dict.fromkeys(
        metric["name"] for metric in metrics if group_name in {None, metric["group"]}
    ) or dict.fromkeys(metric["name"] for metric in metrics)
    requested = {"--group": [group_name] if group_name else [], "--name": names}
    problems = [
        f"{option}: must be one of {', '.join(known[option])}, got {value!r}"
        f"{suggest(value, known[option])}"
        for option, values in requested.items()
        for value in values
        if known[option] and value not in known[option]
    ]
    if problems:
        raise ConfigError("trial metrics", problems)


@group.command(rich_help_panel=_CONTROL)
def pause(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Save a checkpoint and free the slots until you activate it.

    Example: zerolab trial pause 3
    """
    _run_action(
        trial_id,
        "pause",
        "is pausing: it saves a checkpoint and releases its slots",
        as_json=as_json,
    )


@group.command(rich_help_panel=_CONTROL)
def activate(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Resume a paused trial.

    Example: zerolab trial activate 3
    """
    _run_action(trial_id, "activate", "is queued", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def cancel(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Stop a trial after a last checkpoint; the others continue.

    Example: zerolab trial cancel 3
    """
    _run_action(trial_id, "cancel", "is stopping: it saves a checkpoint first", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def kill(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Stop a trial at once, without a checkpoint; the others continue.

    Example: zerolab trial kill 3
    """
    _run_action(trial_id, "kill", "is being killed", as_json=as_json)


@group.command("continue", rich_help_panel=_CONTROL)
def continue_trial(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Resume a failed or stopped trial from its latest checkpoint.

    Example: zerolab trial continue 3
    """
    _run_action(trial_id, "continue", "is queued and resumes from its checkpoint", as_json=as_json)


@group.command(rich_help_panel=_CONTROL)
def fork(
    trial_id: TrialId,
    config: ChangesFiles = None,
    values: Values = None,
    paused: Paused = False,
    as_json: AsJson = False,
) -> None:
    """Start a new experiment from the weights of a trial.

    Prints the id of the new experiment.

    Example: zerolab trial fork 3 --set searcher.max_length.epochs=5
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        experiment = client.trial_action(trial_id, "fork", changes)
    print_warnings(experiment)
    if as_json:
        print_json(experiment)
    else:
        result(str(experiment["id"]))


_NOTHING_RAN = {
    ("pause", "PAUSED"): "is paused",
    ("cancel", "CANCELED"): "is canceled",
    ("kill", "CANCELED"): "is killed",
}
"""Message of an action on a trial without slots, by the action and the state after it."""


def _run_action(trial_id: int, action: str, done: str, *, as_json: bool) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        before = client.trial(trial_id)["state"]
        changed = client.trial_action(trial_id, action)
    state = changed["state"]
    has_ended = before == state and state in {"COMPLETED", "CANCELED", "ERROR"}
    if has_ended:
        done = f"has already ended: {state}"
    elif (action, state) in _NOTHING_RAN:
        done = _NOTHING_RAN[action, state]
    print_done(changed, f"trial {trial_id} {done}", as_json=as_json)
