"""The order of an experiment's trials by a hyperparameter, found out once.

What a trial was started with never changes: so an order stays until a trial joins or is deleted,
and a page of ten thousand trials is a look into a list.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection

from zeroserver.analysis.choice import Choice, Place, place_of, read_place, write_cursor
from zeroserver.analysis.columns import PREFIX, Value, check_column, leaves_of, refuse
from zeroserver.store.database import raw_rows

__all__ = ["Orders"]

_EXPERIMENTS = 8
"""Of which something is kept: those that were asked for last."""
_COLUMNS = 8
"""Orders that are kept of an experiment."""

_COUNT = "SELECT count(*) FROM trials WHERE experiment_id = ?"
_NEW = "SELECT id, hparams FROM trials WHERE experiment_id = ? AND id > ? ORDER BY id"


@dataclass
class _Started:
    """What the trials of an experiment were started with."""

    leaves: dict[int, Mapping[str, Value]] = field(default_factory=dict)
    """By the trial, the oldest first."""
    orders: OrderedDict[str, list[Place]] = field(default_factory=OrderedDict)
    """Places of all trials, by the column with its ``-``."""

    def refresh(self, connection: Connection, experiment_id: int) -> None:
        """Take in the trials that have joined, and forget those that were deleted."""
        last = next(reversed(self.leaves), 0)
        rows = raw_rows(connection, _NEW, (experiment_id, last))
        ((count,),) = raw_rows(connection, _COUNT, (experiment_id,))
        if count < len(self.leaves) + len(rows):
            self.leaves.clear()
            self.orders.clear()
            rows = raw_rows(connection, _NEW, (experiment_id, 0))
        if rows:
            self.leaves |= {trial_id: leaves_of(text) for trial_id, text in rows}
            self.orders.clear()

    def order(self, sort: str) -> list[Place]:
        """Return the places of all trials in an order."""
        found = self.orders.get(sort)
        if found is None:
            name = sort.removeprefix("-").removeprefix(PREFIX)
            sign = -1 if sort.startswith("-") else 1
            there = self.leaves.items()
            found = sorted(place_of(each.get(name), trial_id, sign) for trial_id, each in there)
            self.orders[sort] = found
            if len(self.orders) > _COLUMNS:
                self.orders.popitem(last=False)
        self.orders.move_to_end(sort)
        return found


class Orders:
    """Kept in memory for the experiments that are looked at; any thread may ask."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Started] = OrderedDict()
        self._lock = threading.Lock()

    def choose(
        self, connection: Connection, experiment_id: int, sort: str, after: str | None, limit: int
    ) -> Choice:
        """Choose a page of all trials of an experiment.

        Args:
            connection: For reading.
            experiment_id: Whose trials.
            sort: A hyperparameter, ``hparams.NAME``; ``-`` before it for the largest first.
            after: Cursor that the page before gave.
            limit: Most trials of a page.

        Raises:
            ConfigError: If no trial has it, or the cursor is none.
        """
        column = sort.removeprefix("-")
        name = column.removeprefix(PREFIX)
        sign = -1 if sort.startswith("-") else 1
        place = None if after is None else read_place(after, sign)
        with self._lock:
            started = self._known.setdefault(experiment_id, _Started())
            self._known.move_to_end(experiment_id)
            if len(self._known) > _EXPERIMENTS:
                self._known.popitem(last=False)
            started.refresh(connection, experiment_id)
            if not any(name in each for each in started.leaves.values()):
                names = dict.fromkeys(name for each in started.leaves.values() for name in each)
                refuse([check_column(column, names, "sort")])
            order = started.order(sort)
            first = 0 if place is None else bisect_right(order, place)
            page = order[first : first + limit]
            ids = [abs(trial_id) for _, trial_id in page]
            cursor = None
            if first + limit < len(order):
                cursor = write_cursor(started.leaves[ids[-1]].get(name), ids[-1])
            return Choice(ids, len(order), cursor)
