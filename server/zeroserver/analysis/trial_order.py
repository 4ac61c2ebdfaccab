"""The trials of an experiment by their hyperparameters: orders and conditions, found out once.

What a trial was started with never changes: so an order stays, and the trials for which a condition
holds, until a trial joins or is deleted; a page of ten thousand trials is a look into a list.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from sqlalchemy import Connection

from zeroserver.analysis.columns import (
    PREFIX,
    Value,
    check_column,
    leaves_of,
    on_wire,
    refuse,
)
from zeroserver.analysis.trial_filter import (
    Choice,
    Condition,
    Place,
    holds_for,
    place_of,
    read_place,
    write_cursor,
)
from zeroserver.store.database import raw_rows

__all__ = ["Orders"]

_EXPERIMENTS = 8
"""Of which something is kept: those that were asked for last."""
_COLUMNS = 8
"""Orders that are kept of an experiment, and as many conditions."""

_CELLS = 200
"""Hyperparameters of an experiment of which the column is kept."""

_COUNT = "SELECT count(*) FROM trials WHERE experiment_id = ?"
_NEW = "SELECT id, hparams FROM trials WHERE experiment_id = ? AND id > ? ORDER BY id"


@dataclass
class _Started:
    """What the trials of an experiment were started with."""

    leaves: dict[int, Mapping[str, Value]] = field(default_factory=dict)
    """By the trial, the oldest first."""
    orders: OrderedDict[str, list[Place]] = field(default_factory=OrderedDict)
    """Places of all trials, by the column with its ``-``."""
    held: OrderedDict[bytes, frozenset[int]] = field(default_factory=OrderedDict)
    """Trials for which a condition holds, by the condition."""
    cells: OrderedDict[str, msgspec.Raw] = field(default_factory=OrderedDict)
    """JSON of the values of a hyperparameter in all trials, by its name."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of this experiment: others are not held up."""

    def refresh(self, connection: Connection, experiment_id: int) -> None:
        """Take in the trials that have joined, and forget those that were deleted."""
        last = next(reversed(self.leaves), 0)
        rows = raw_rows(connection, _NEW, (experiment_id, last))
        ((count,),) = raw_rows(connection, _COUNT, (experiment_id,))
        if count < len(self.leaves) + len(rows):
            self.leaves.clear()
            self._forget()
            rows = raw_rows(connection, _NEW, (experiment_id, 0))
        if rows:
            self.leaves |= {trial_id: leaves_of(text) for trial_id, text in rows}
            self._forget()

    def _forget(self) -> None:
        self.orders.clear()
        self.held.clear()
        self.cells.clear()

    def column(self, name: str) -> msgspec.Raw:
        """Return the JSON of a hyperparameter in all trials, the oldest first."""
        found = self.cells.get(name)
        if found is None:
            values = [on_wire(each.get(name)) for each in self.leaves.values()]
            found = self.cells[name] = msgspec.Raw(msgspec.json.encode(values))
            if len(self.cells) > _CELLS:
                self.cells.popitem(last=False)
        return found

    def check(self, asked: Sequence[tuple[str, str]]) -> None:
        """Refuse hyperparameters that no trial has.

        Args:
            asked: Columns, each with the parameter that gave it.

        Raises:
            ConfigError: With all of them.
        """
        there = self.leaves.values()
        wrong = [
            (column, what)
            for column, what in asked
            if not any(column.removeprefix(PREFIX) in each for each in there)
        ]
        known = dict.fromkeys(name for each in there for name in each) if wrong else {}
        refuse([check_column(column, known, what) for column, what in wrong])

    def holding(self, where: Sequence[Condition]) -> frozenset[int]:
        """Return the trials for which all conditions hold."""
        found = [self._holding(each) for each in where]
        return frozenset.intersection(*found) if found else frozenset(self.leaves)

    def _holding(self, condition: Condition) -> frozenset[int]:
        key = msgspec.json.encode(condition)
        if key not in self.held:
            column, sign, wanted = condition
            name, holds = column.removeprefix(PREFIX), holds_for(sign, wanted)
            there = self.leaves.items()
            self.held[key] = frozenset(
                trial_id for trial_id, each in there if holds(each.get(name))
            )
            if len(self.held) > _COLUMNS:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]

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

    @contextmanager
    def _started(self, connection: Connection, experiment_id: int) -> Iterator[_Started]:
        with self._lock:
            started = self._known.setdefault(experiment_id, _Started())
            self._known.move_to_end(experiment_id)
            if len(self._known) > _EXPERIMENTS:
                self._known.popitem(last=False)
        with started.lock:
            started.refresh(connection, experiment_id)
            yield started

    def leaves(self, connection: Connection, experiment_id: int) -> dict[int, Mapping[str, Value]]:
        """Return the hyperparameters of all trials, by the trial, the oldest first."""
        with self._started(connection, experiment_id) as started:
            return dict(started.leaves)

    def columns(
        self,
        connection: Connection,
        experiment_id: int,
        ids: Sequence[int],
        names: Sequence[str] | None,
    ) -> dict[str, msgspec.Raw] | None:
        """Return hyperparameters of an experiment's trials as columns of JSON.

        Args:
            connection: For reading.
            experiment_id: Whose trials.
            ids: Those that the columns must have, the oldest first.
            names: Which hyperparameters; all when None.

        Returns:
            None if there are other trials by now.

        Raises:
            ConfigError: If no trial has one of them.
        """
        with self._started(connection, experiment_id) as started:
            if len(ids) != len(started.leaves) or (
                ids and ids[-1] != next(reversed(started.leaves))
            ):
                return None
            if names is None:
                names = list(
                    dict.fromkeys(name for each in started.leaves.values() for name in each)
                )
            else:
                started.check([(PREFIX + name, "column") for name in names])
            return {name: started.column(name) for name in names}

    def holding(
        self, connection: Connection, experiment_id: int, where: Sequence[Condition]
    ) -> frozenset[int]:
        """Return the trials of an experiment for which all conditions hold.

        Args:
            connection: For reading.
            experiment_id: Whose trials.
            where: Conditions on hyperparameters.

        Raises:
            ConfigError: If no trial has one of these.
        """
        with self._started(connection, experiment_id) as started:
            started.check([(column, "where") for column, _, _ in where])
            return started.holding(where)

    def choose(
        self,
        connection: Connection,
        experiment_id: int,
        sort: str,
        after: str | None,
        limit: int,
        *,
        where: Sequence[Condition],
        only: frozenset[int] | None = None,
    ) -> Choice:
        """Choose a page of the trials of an experiment.

        Args:
            connection: For reading.
            experiment_id: Whose trials.
            sort: A hyperparameter, ``hparams.NAME``; ``-`` before it for the largest first.
            after: Cursor that the page before gave.
            limit: Most trials of a page.
            where: Conditions on hyperparameters that all must hold.
            only: Ids of those trials that may be chosen; None: all.

        Raises:
            ConfigError: If no trial has one of these, or the cursor is none.
        """
        column = sort.removeprefix("-")
        name = column.removeprefix(PREFIX)
        sign = -1 if sort.startswith("-") else 1
        place = None if after is None else read_place(after, sign)
        with self._started(connection, experiment_id) as started:
            started.check([(column, "sort"), *((each[0], "where") for each in where)])
            order = started.order(sort)
            if where or only is not None:
                held = started.holding(where)
                held = held if only is None else held & only
                order = [each for each in order if abs(each[1]) in held]
            first = 0 if place is None else bisect_right(order, place)
            page = order[first : first + limit]
            ids = [abs(trial_id) for _, trial_id in page]
            cursor = None
            if first + limit < len(order):
                cursor = write_cursor(started.leaves[ids[-1]].get(name), ids[-1])
            return Choice(ids, len(order), cursor)
