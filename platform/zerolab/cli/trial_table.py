"""Trials as a table: for people, with the hyperparameters that differ; as CSV, with all."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from zerolab.cli.output import end_state, number, print_table, say
from zerolab.contract.flatten import flatten_hparams, short_names
from zerolab.contract.spreadsheet import safe_cell
from zerolab.formatting import duration_text

__all__ = ["column_of", "csv_lines", "print_trials"]

FIELDS = (
    "id", "state", "best_validation", "latest_validation", "best_steps", "steps_completed",
    "progress", "restarts", "slot_seconds", "activity",
)  # fmt: skip
_SORTED = (*FIELDS, "result", "metric")
_ALWAYS = ("id", "state", "batches", "best", "latest", "restarts", "slot time")
_MORE = ("seed", "best_checkpoint", "latest_checkpoint", "started_at", "ended_at", "error")

Trials = Sequence[Mapping[str, Any]]


def column_of(name: str) -> str:
    """Return the server's name of a column that a user names; ``-`` before it stays.

    ``metric`` and the fields of a trial are themselves; all else is a hyperparameter.
    """
    sign, bare = ("-", name[1:]) if name.startswith("-") else ("", name)
    return f"{sign}{bare}" if bare in _SORTED or "hparams." in bare else f"{sign}hparams.{bare}"


def print_trials(trials: Trials) -> None:
    """Print trials as a table, a column for each hyperparameter that differs between them.

    Says which of them are called by a part of their names there, and which do not fit.
    """
    flat = [flatten_hparams(one["hparams"]) for one in trials]
    differ = [
        name
        for name in dict.fromkeys(name for each in flat for name in each)
        if len({json.dumps(each.get(name)) for each in flat}) > 1
    ]
    short = short_names(name for each in flat for name in each)
    heads = {short[n] if short[n] not in _ALWAYS else f"hparams.{n}": n for n in differ}
    rows = [
        (
            one["id"],
            end_state(one),
            one["steps_completed"],
            number(one["best_validation"]),
            number(one["latest_validation"]),
            one["restarts"],
            duration_text(one["slot_seconds"]),
            *(number(each.get(name)) for name in differ),
        )
        for one, each in zip(trials, flat, strict=True)
    ]
    left_out = print_table([*_ALWAYS, *heads], rows, shortened=heads.keys(), optional=heads.keys())
    for head, name in heads.items():
        if not head.endswith(name) and head not in left_out:
            say(f"{head} is {name}")
    if left_out:
        names = ", ".join(heads[head] for head in left_out)
        say(f"no room in this terminal for {names}; --csv and --json have all")


def csv_lines(trials: Trials) -> str:
    """Return trials as a CSV file with a header: their fields, and all their hyperparameters."""
    flat = [flatten_hparams(one["hparams"]) for one in trials]
    names = list(dict.fromkeys(name for each in flat for name in each))
    text = io.StringIO()
    out = csv.writer(text)
    heads = [*FIELDS, *(safe_cell(f"hparams.{name}") for name in names), *_MORE]
    out.writerow(heads)
    for one, each in zip(trials, flat, strict=True):
        cells = [*(one[f] for f in FIELDS), *(each.get(n) for n in names), *(one[f] for f in _MORE)]
        out.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
