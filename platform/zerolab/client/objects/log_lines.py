"""Log lines of trials and experiments."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, ClassVar

from zerolab.client.objects.interface import ClientMethods
from zerolab.client.objects.server_object import ServerObject

__all__ = ["POLL_S", "LogLine", "log_lines"]

POLL_S = 0.3
"""Seconds between two requests while a client waits."""
_PAGE = 1000


class LogLine(ServerObject):
    """Line of a log.

    Example:
        >>> client = zerolab.Client()
        >>> (line,) = client.trial(1).logs(tail=1)
        >>> line.text, line.stream, str(line)
        ('trained 10 batches', 'stdout', 'trained 10 batches')
    """

    _shown: ClassVar = ("text", "trial_id", "rank")
    _row: ClassVar = ("time", "trial_id", "rank", "text")

    id: int
    """Id; increases in the order of arrival."""
    trial_id: int | None
    """Trial of the line."""
    run_id: int | None
    """Run of the line."""
    rank: int | None
    """Rank that wrote it; None for the agent and the server."""
    stream: str
    """``stdout``, ``stderr``, ``agent`` or ``server``."""
    level: str | None
    """``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL``, if known."""
    text: str
    """Text of the line."""
    time: datetime | None
    """Time of writing."""
    host: str | None
    """Host of the agent that sent it; None for the server."""

    def __str__(self) -> str:
        return str(self["text"])


def log_lines(
    client: ClientMethods,
    read_page: Callable[..., dict[str, Any]],
    has_ended: Callable[[], bool],
    *,
    follow: bool,
    tail: int | None,
    **filters: str | int | None,
) -> Iterator[LogLine]:
    """Yield log lines so far or, with ``follow``, until the experiment or trial has ended.

    Args:
        client: Client of the lines.
        read_page: Reads a page with the given filters.
        has_ended: Returns whether no more lines can appear.
        follow: Wait for new lines.
        tail: Begin with the last N lines.
        filters: ``rank`` and ``level``.
    """
    after: int | None = None
    while True:
        # Read before the page: after an end seen here, the page has all lines.
        is_last = not follow or has_ended()
        while True:
            limit = None if tail is not None else _PAGE
            page = read_page(**filters, tail=tail, after=after, limit=limit)
            for fields in page["logs"]:
                yield LogLine(client, fields)
                # Ids are given by the server's only writer, in the order of its commits: no line
                # with a smaller id can appear after this page, so none is missed or repeated.
                after = fields["id"]
            if tail is not None or page.get("next_after") is None:
                break
        tail = None
        if is_last:
            return
        time.sleep(POLL_S)
