"""Output of commands: tables for people, JSON for programs, messages on standard error."""

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from zerolab.contract.flatten import flatten_hparams

__all__ = [
    "LENGTHS",
    "ArchivedToo",
    "AsJson",
    "ColoredText",
    "Port",
    "Yes",
    "age",
    "checkpoint_text",
    "end_state",
    "hparam_lines",
    "number",
    "print_archived_hint",
    "print_done",
    "print_fields",
    "print_json",
    "print_message",
    "print_table",
    "print_warnings",
    "problem_lines",
    "result",
    "unread_text",
    "waiting_lines",
    "without_lengths",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
ArchivedToo = Annotated[bool, typer.Option("--archived", help="Include archived ones.")]


def _port(text: str) -> int:
    """Read the value of ``--port``.

    Raises:
        typer.BadParameter: If it is not a port.
    """
    from zerolab.contract.limits import read_port

    try:
        return read_port(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Port = Annotated[
    int | None,
    typer.Option(
        "--port",  # typer 0.27 loses the name of an option with a metavar
        parser=_port,
        metavar="PORT",
        help="Port of the server, if this command starts it; 0 for any free port. "
        "Default: 8080 if it is free.",
    ),
]
LENGTHS = frozenset({"batches", "epochs"})
"""Metrics that every validation has: how long the trial has trained."""
_NARROWEST = 8
"""Minimum width of a column in characters, in any terminal."""

_NAMED = 8
_WIDE = 400
"""Line width without a terminal, in characters."""
_CODES = {"green": 32, "yellow": 33, "red": 31}


class ColoredText(str):
    """Text with a color on terminals.

    Args:
        text: The text.
        tone: ``green``, ``yellow``, ``red``, or empty.
    """

    tone: str

    def __new__(cls, text: str, tone: str) -> "ColoredText":
        """Create the text."""
        colored = super().__new__(cls, text)
        colored.tone = tone
        return colored


def end_state(resource: Mapping[str, Any]) -> ColoredText:
    """Return the state of an experiment or a trial, with the number of trials that failed.

    Green is only used for a result without failed trials.
    """
    state, failed = str(resource["state"]), resource.get("failed_trials", 0)
    good = "yellow" if resource["result_problem"] or failed else "green"
    tone = {"COMPLETED": good, "ERROR": "red"}.get(state, "")
    if state != "COMPLETED" or not failed:
        return ColoredText(state, tone)
    total, canceled = resource["num_trials"], resource["canceled_trials"]
    counts = f"{total - failed - canceled} of {total}, {failed} failed"
    return ColoredText(f"{state} ({counts}{f', {canceled} canceled' if canceled else ''})", tone)


def unread_text(experiment: Mapping[str, Any]) -> str | None:
    """Warn of the searched hyperparameters that no trial of an experiment has read."""
    names = experiment["unread_hparams"]
    if not names:
        return None
    return (
        f"the trials never read {', '.join(names)}, which the search varies; "
        "read it from get_hparams(), or remove it from the search"
    )


def without_lengths(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return validation metrics without ``batches`` and ``epochs``, the lengths at which it was."""
    return {name: metrics[name] for name in metrics if name not in LENGTHS}


def checkpoint_text(best: Mapping[str, Any], metric: str | None) -> str | None:
    """Format the best checkpoint of an experiment or a trial, with its validation.

    Args:
        best: The server's resource.
        metric: The searcher's metric.
    """
    checkpoint = best["checkpoint"]
    if checkpoint is None:
        return None
    position = f"batch {checkpoint['steps_completed']} of trial {checkpoint['trial_id']}"
    return f"{checkpoint['uuid']}  {metric} {number(best['validation'])}, {position}"


def problem_lines(noun: str, resources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return why experiments or trials failed or have no result, one line each."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    lines = [
        f"{noun} {resource['id']} {'failed' if resource['state'] == 'ERROR' else 'has no result'}: "
        f"{resource['result_problem']}"
        for resource in resources
        if resource["result_problem"]
    ]
    return [line if len(line) <= width else f"{line[: width - 1]}\u2026" for line in lines]


def waiting_lines(noun: str, resources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return why experiments or trials wait, one line for each reason."""
    by_reason: dict[str, list[int]] = {}
    for resource in resources:
        if resource["waiting_reason"]:
            by_reason.setdefault(resource["waiting_reason"], []).append(resource["id"])
    lines = []
    for reason, ids in by_reason.items():
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        lines.append(f"{noun} {', '.join(map(str, ids[:_NAMED]))}{more} waits: {reason}")
    return lines


def result(text: str) -> None:
    """Print a result, for people or programs."""
    print(text)  # noqa: T201 - the output


def print_message(text: str) -> None:
    """Print a message that is not a result."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the output


def removed_values(experiment: Mapping[str, Any]) -> str:
    """Return the message about the values that an experiment's retention of metrics removed."""
    days = experiment["config"]["retention_policy"]["metric_retention_days"]
    when = "" if days is None else f" {days} days after its end"
    return (
        f"experiment {experiment['id']}: most values of training and system metrics were removed"
        f"{when} (retention_policy.metric_retention_days); about one of 1,024 steps is left"
    )


def print_done(resource: Any, message: str, *, as_json: bool) -> None:
    """Print a changed resource as JSON, or else a message on standard error."""
    if as_json:
        print_json(resource)
    else:
        print_message(message)


def print_archived_hint(resources: Collection[object], *, shown: bool) -> None:
    """Mention archived resources if a list is empty."""
    if not resources and not shown:
        print_message("nothing to show; --archived includes archived ones")


def print_warnings(resource: Mapping[str, Any]) -> None:
    """Print the server's warnings about a submission."""
    for line in resource.get("warnings", []):
        print_message(f"warning: {line}")


def print_json(content: Any) -> None:
    """Print JSON as a result."""
    result(json.dumps(content, indent=2, default=str))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    shortened: Collection[str] = (),
    optional: Collection[str] = (),
) -> list[str]:
    """Print a table as a result; empty cells for None.

    Args:
        columns: Titles of the columns.
        rows: Rows with one cell per column.
        shortened: Columns that are truncated if the terminal is too narrow; others are wrapped.
        optional: Truncated columns that are omitted if they still do not fit.

    Returns:
        The omitted columns.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    row_lists = [list(row) for row in rows]
    cells = [["" if cell is None else str(cell) for cell in row] for row in row_lists]
    full_widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    if optional and not sys.stdout.isatty():  # files and pagers have no width limit
        console.width = max(_WIDE, _width(full_widths))
    widths = _fit(columns, full_widths, shortened, optional, console.width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i in widths:
        table.add_column(columns[i], overflow="fold")
    for texts, row in zip(cells, row_lists, strict=True):
        line = []
        for i, width in widths.items():
            cut = columns[i] in shortened and len(texts[i]) > width
            text = f"{texts[i][: width - 1]}\u2026" if cut else texts[i]
            cell = row[i]
            line.append(Text(text, style=cell.tone if isinstance(cell, ColoredText) else ""))
        table.add_row(*line)
    console.print(table)
    return [name for i, name in enumerate(columns) if i not in widths]


def _fit(
    columns: Sequence[str],
    full_widths: Sequence[int],
    shortened: Collection[str],
    optional: Collection[str],
    room: int,
) -> dict[int, int]:
    """Return the columns that fit in one line, with their widths.

    The widest are truncated first. If that is not enough, optional columns are kept from the left
    as long as there is room.
    """
    least = [
        min(width, max(_NARROWEST, len(name))) if name in shortened else width
        for name, width in zip(columns, full_widths, strict=True)
    ]
    fixed = [i for i, name in enumerate(columns) if name not in optional]
    for i in sorted(set(range(len(columns))) - set(fixed)):
        if _width([least[index] for index in (*fixed, i)]) <= room:
            fixed.append(i)
    widths = {i: full_widths[i] for i in sorted(fixed)}
    while _width(widths.values()) > room:
        spare = [i for i in widths if widths[i] > least[i]]
        if not spare:
            break
        widths[max(spare, key=lambda i: widths[i])] -= 1
    return widths


def _width(columns: Collection[int]) -> int:
    """Return the width of a table with these columns, including separators."""
    return sum(columns) + 2 * len(columns)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print named values, one per line; None and empty values are omitted."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", [])}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        first, *more = str(value).splitlines() or [""]
        tone = value.tone if isinstance(value, ColoredText) else ""
        result(f"{name:<{width}}  {_coloured(first, tone)}")
        for line in more:
            result(f"{'':<{width}}  {line}")


def hparam_lines(trial: Mapping[str, Any]) -> str:
    """Format a trial's hyperparameters, one per line."""
    return "\n".join(
        f"{name}: {value}" for name, value in flatten_hparams(trial["hparams"]).items()
    )


def _coloured(text: str, tone: str) -> str:
    if not tone or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_CODES[tone]}m{text}\x1b[0m"


def number(value: object, digits: int = 4) -> str:
    """Format a metric with few digits; other values are returned unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.{digits}g}"


def age(moment: str | None, now: datetime | None = None) -> str:
    """Format the age of an ISO 8601 time in one unit: ``40 s``, ``12 min``, ``3 h``."""
    if not moment:
        return ""
    passed = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit}"
    return f"{max(0, passed):.0f} s"
