"""Trial tables: differing hyperparameters for people, all of them as CSV."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerolab.cli.output import end_state, number, print_message, print_table
from zerolab.contract.flatten import flatten_hparams, safe_cell, short_names
from zerolab.formatting import duration_text

__all__ = ["column_of", "csv_lines", "print_trials", "sort_problem"]

FIELDS = (
    "id", "state", "best_validation", "latest_validation", "best_steps", "steps_completed",
    "progress", "restarts", "slot_seconds", "activity",
)  # fmt: skip
_SORTED = (*FIELDS, "result", "metric")
_METRIC = re.compile(r"(last|min|max)\.[^.]+\..+")
_ALWAYS = ("id", "state", "batches", "best", "latest", "restarts", "slot time")
_MORE = ("seed", "best_checkpoint", "latest_checkpoint", "started_at", "ended_at", "error")

Trials = Sequence[Mapping[str, Any]]


def column_of(name: str) -> str:
    """Return the server's name of a column; a ``-`` prefix is kept.

    ``metric``, the fields of a trial, and metrics such as ``last.validation.loss`` are unchanged;
    other names are hyperparameters.
    """
    sign, bare = ("-", name[1:]) if name.startswith("-") else ("", name)
    is_complete = bare in _SORTED or "hparams." in bare or _METRIC.match(bare)
    return f"{sign}{bare}" if is_complete else f"{sign}hparams.{bare}"


def sort_problem(name: str, metric: str, others: Sequence[tuple[str, str]]) -> str:
    """Return the message for a column that the server does not know.

    Args:
        name: The column, as the user gave it.
        metric: The searcher's metric.
        others: Names of hyperparameters and metrics, each with the column that sorts by it.
    """
    from zerolab.schema.section import closest  # slow import, rarely needed

    bare = name.removeprefix("-")
    columns = {field: field for field in FIELDS} | dict(others)
    columns |= {column: column for column in columns.values()}
    if metric:
        columns[metric] = "metric"
    near = closest(bare, columns)
    got = f"--sort: must be `metric`, a field, a hyperparameter or a metric, got {bare!r}"
    if near is None:
        return f"{got}; there are: {', '.join(dict.fromkeys(['metric', *columns.values()]))}"
    column = columns[near]
    best_first = f" ({metric}, best first)" if column == "metric" else ""
    return f"{got}; did you mean {column!r}{best_first}?"


def print_trials(trials: Trials) -> None:
    """Print trials as a table, with a column for each hyperparameter that differs.

    Also prints which columns have short names, and which are omitted.
    """
    flat = [flatten_hparams(trial["hparams"]) for trial in trials]
    differ = [
        name
        for name in dict.fromkeys(name for hparams in flat for name in hparams)
        if len({json.dumps(hparams.get(name)) for hparams in flat}) > 1
    ]
    short = short_names(name for hparams in flat for name in hparams)
    heads = {short[n] if short[n] not in _ALWAYS else f"hparams.{n}": n for n in differ}
    rows = [
        (
            trial["id"],
            end_state(trial),
            trial["steps_completed"],
            number(trial["best_validation"]),
            number(trial["latest_validation"]),
            trial["restarts"],
            duration_text(trial["slot_seconds"]),
            *(number(hparams.get(name)) for name in differ),
        )
        for trial, hparams in zip(trials, flat, strict=True)
    ]
    left_out = print_table([*_ALWAYS, *heads], rows, shortened=heads.keys(), optional=heads.keys())
    for head, name in heads.items():
        if not head.endswith(name) and head not in left_out:
            print_message(f"{head} is {name}")
    if left_out:
        names = ", ".join(heads[head] for head in left_out)
        print_message(f"the terminal is too narrow for {names}; --csv and --json print all")


def csv_lines(trials: Trials) -> str:
    """Return trials as a CSV file with a header: their fields, and all their hyperparameters."""
    flat = [flatten_hparams(trial["hparams"]) for trial in trials]
    names = list(dict.fromkeys(name for hparams in flat for name in hparams))
    text = io.StringIO()
    out = csv.writer(text)
    heads = [*FIELDS, *(safe_cell(f"hparams.{name}") for name in names), *_MORE]
    out.writerow(heads)
    for trial, hparams in zip(trials, flat, strict=True):
        cells = [
            *(trial[f] for f in FIELDS),
            *(hparams.get(n) for n in names),
            *(trial[f] for f in _MORE),
        ]
        out.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
