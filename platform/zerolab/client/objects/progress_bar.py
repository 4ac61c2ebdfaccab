"""Progress bar of a client that waits."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

__all__ = ["Progress", "show_progress"]

_LINE_S = 10.0
"""Seconds between lines, on outputs that cannot be redrawn."""


class Progress(NamedTuple):
    """Displayed progress."""

    share: float
    """0 to 1."""
    text: str
    """Details for the user."""
    has_ended: bool


Show = Callable[[Progress], None]


@contextmanager
def show_progress(title: str, *, shown: bool) -> Iterator[Show]:
    """Show a progress bar in a notebook or on a terminal, and lines elsewhere.

    Args:
        title: Text before the bar.
        shown: Show it; otherwise nothing is printed.

    Yields:
        Function that shows the current progress.
    """
    if not shown:
        yield lambda _progress: None
    elif _in_notebook():
        yield _notebook_bar(title)
    elif sys.stderr.isatty():
        with _terminal_bar(title) as show:
            yield show
    else:
        yield _lines(title)


def _notebook_bar(title: str) -> Show:
    import IPython.display

    ipython: Any = IPython.display

    def html(share: float, text: str) -> Any:
        bar = f'<progress value="{share:.4f}" max="1"></progress>'
        return ipython.HTML(
            f"<div>{bar} {escape(title)}, {100 * share:.0f} %&emsp;{escape(text)}</div>"
        )

    handle = ipython.display(html(0.0, ""), display_id=True)

    def show(progress: Progress) -> None:
        handle.update(html(progress.share, progress.text))

    return show


@contextmanager
def _terminal_bar(title: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(title, markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True, highlight=False)) as bar:
        task = bar.add_task("", total=1.0)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.share, description=progress.text)

        yield show


def _lines(title: str) -> Show:
    printed_at, printed = -_LINE_S, ""

    def show(progress: Progress) -> None:
        nonlocal printed_at, printed
        line = f"{title}: {100 * progress.share:.0f} %, {progress.text}"
        recent = time.monotonic() - printed_at < _LINE_S
        if line != printed and (not recent or progress.has_ended):
            printed_at, printed = time.monotonic(), line
            sys.stderr.write(line + "\n")

    return show


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
