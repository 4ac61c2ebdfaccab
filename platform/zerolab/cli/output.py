"""How commands speak: tables for people, JSON for programs, messages on standard error."""

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
    "ArchivedToo",
    "AsJson",
    "Toned",
    "Yes",
    "age",
    "checkpoint_text",
    "end_state",
    "hparam_lines",
    "number",
    "port_of",
    "print_fields",
    "print_json",
    "print_table",
    "problem_lines",
    "result",
    "say",
    "say_archived",
    "say_warnings",
    "waiting_lines",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ArchivedToo = Annotated[bool, typer.Option("--archived", help="Those that are archived, too.")]


def port_of(text: str) -> int:
    """Read the value of ``--port``.

    Raises:
        typer.BadParameter: If it is no port.
    """
    from zerolab.contract.ports import read_port

    try:
        return read_port(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_NARROWEST = 8
"""Characters that a column keeps, however narrow the terminal is."""

_NAMED = 8
_WIDE = 400
"""Characters in a line when nobody's terminal limits them."""


_CODES = {"green": 32, "yellow": 33, "red": 31}


class Toned(str):
    """Text that has a colour where it is shown on a terminal.

    Args:
        text: What to show.
        tone: ``green``, ``yellow``, ``red``, or empty.
    """

    tone: str

    def __new__(cls, text: str, tone: str) -> "Toned":
        """Make the text."""
        made = super().__new__(cls, text)
        made.tone = tone
        return made


def end_state(resource: Mapping[str, Any]) -> Toned:
    """Return the state of an experiment or a trial, with the number of trials that failed.

    Green is only for ends with a result and without a failed trial.
    """
    state, failed = str(resource["state"]), resource.get("failed_trials", 0)
    good = "yellow" if resource["result_problem"] or failed else "green"
    tone = {"COMPLETED": good, "ERROR": "red"}.get(state, "")
    if state != "COMPLETED" or not failed:
        return Toned(state, tone)
    total, canceled = resource["num_trials"], resource["canceled_trials"]
    counts = f"{total - failed - canceled} of {total}, {failed} failed"
    return Toned(f"{state} ({counts}{f', {canceled} canceled' if canceled else ''})", tone)


def checkpoint_text(best: Mapping[str, Any], metric: str | None) -> str | None:
    """Write the best checkpoint of an experiment or a trial, with its own validation.

    Args:
        best: As the server answers it.
        metric: The searcher's.
    """
    found = best["checkpoint"]
    if found is None:
        return None
    place = f"batch {found['steps_completed']} of trial {found['trial_id']}"
    return f"{found['uuid']}  {metric} {number(best['validation'])}, {place}"


def problem_lines(noun: str, resources: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each experiment or trial that has failed, or ended without a result: why."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    lines = [
        f"{noun} {one['id']} {'failed' if one['state'] == 'ERROR' else 'has no result'}: "
        f"{one['result_problem']}"
        for one in resources
        if one["result_problem"]
    ]
    return [line if len(line) <= width else f"{line[: width - 1]}\u2026" for line in lines]


def waiting_lines(noun: str, resources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say why experiments or trials wait, one line for each reason."""
    by_reason: dict[str, list[int]] = {}
    for one in resources:
        if one["waiting_reason"]:
            by_reason.setdefault(one["waiting_reason"], []).append(one["id"])
    lines = []
    for reason, ids in by_reason.items():
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        lines.append(f"{noun} {', '.join(map(str, ids[:_NAMED]))}{more} waits: {reason}")
    return lines


def result(text: str) -> None:
    """Print a result, for people or programs."""
    print(text)  # noqa: T201 - this is the place


def say(text: str) -> None:
    """Print a message that is no result."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the place


def say_archived(found: Collection[object], *, shown: bool) -> None:
    """Say of an empty list how to see what was put away."""
    if not found and not shown:
        say("there is none; --archived lists those that are archived, too")


def say_warnings(made: Mapping[str, Any]) -> None:
    """Print what the server came upon in a submission that it has taken."""
    for line in made.get("warnings", []):
        say(f"warning: {line}")


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
        columns: Their heads.
        rows: As many cells each as there are columns.
        shortened: Columns that are cut where the terminal is too narrow; the others are folded.
        optional: Those of the shortened columns that are left out where they do not fit even then.

    Returns:
        The columns that were left out.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    given = [list(row) for row in rows]
    cells = [["" if cell is None else str(cell) for cell in row] for row in given]
    wanted = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    if optional and not sys.stdout.isatty():  # a file, or a pager, is as wide as it need be
        console.width = max(_WIDE, _width(wanted))
    widths = _fit(columns, wanted, shortened, optional, console.width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i in widths:
        table.add_column(columns[i], overflow="fold")
    for texts, row in zip(cells, given, strict=True):
        line = []
        for i, width in widths.items():
            cut = columns[i] in shortened and len(texts[i]) > width
            text = f"{texts[i][: width - 1]}\u2026" if cut else texts[i]
            cell = row[i]
            line.append(Text(text, style=cell.tone if isinstance(cell, Toned) else ""))
        table.add_row(*line)
    console.print(table)
    return [name for i, name in enumerate(columns) if i not in widths]


def _fit(
    columns: Sequence[str],
    wanted: Sequence[int],
    shortened: Collection[str],
    optional: Collection[str],
    room: int,
) -> dict[int, int]:
    """Find the columns that fit in one line, and how wide each of them is there.

    The widest are cut first. Where cutting all does not do, columns that are optional are kept from
    the left as long as there is room.
    """
    least = [
        min(width, max(_NARROWEST, len(name))) if name in shortened else width
        for name, width in zip(columns, wanted, strict=True)
    ]
    kept = [i for i, name in enumerate(columns) if name not in optional]
    for i in sorted(set(range(len(columns))) - set(kept)):
        if _width([least[one] for one in (*kept, i)]) <= room:
            kept.append(i)
    widths = {i: wanted[i] for i in sorted(kept)}
    while _width(widths.values()) > room:
        spare = [i for i in widths if widths[i] > least[i]]
        if not spare:
            break
        widths[max(spare, key=lambda i: widths[i])] -= 1
    return widths


def _width(columns: Collection[int]) -> int:
    """Of a table whose columns are so wide, with what it puts between and around them."""
    return sum(columns) + 2 * len(columns)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print named values, one a line; those that are None or empty are left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", [])}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        first, *more = str(value).splitlines() or [""]
        tone = value.tone if isinstance(value, Toned) else ""
        result(f"{name:<{width}}  {_coloured(first, tone)}")
        for line in more:
            result(f"{'':<{width}}  {line}")


def hparam_lines(trial: Mapping[str, Any]) -> str:
    """Write the hyperparameters of a trial, one in a line."""
    return "\n".join(
        f"{name}: {value}" for name, value in flatten_hparams(trial["hparams"]).items()
    )


def _coloured(text: str, tone: str) -> str:
    if not tone or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_CODES[tone]}m{text}\x1b[0m"


def number(value: object, digits: int = 4) -> str:
    """Write a metric in few digits; what is no number stays as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.{digits}g}"


def age(moment: str | None, now: datetime | None = None) -> str:
    """Write how long ago an ISO 8601 time was, in one unit: ``40 s``, ``12 min``, ``3 h``."""
    if not moment:
        return ""
    passed = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit}"
    return f"{max(0, passed):.0f} s"
