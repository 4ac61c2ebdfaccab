"""Cache of trials sorted and filtered by hyperparameters.

Hyperparameters of a trial never change. Therefore sort orders and the matches of conditions stay
valid until a trial is added or deleted, and a page of 10,000 trials is a list slice.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from sqlalchemy import Connection

from zeroserver.analysis.columns import (
    PREFIX,
    Value,
    check_column,
    decode_hparams,
    raise_problems,
    to_json_value,
)
from zeroserver.analysis.trial_filter import (
    Condition,
    SelectedPage,
    SortPosition,
    condition_matcher,
    cursor_position,
    sort_position,
    write_cursor,
)
from zeroserver.store.database import raw_rows

__all__ = ["TrialOrders"]

_MAX_EXPERIMENTS = 8
"""Maximum number of cached experiments; the least recently used one is dropped."""
_MAX_ORDERS = 8
"""Maximum number of cached orders, and of cached conditions, of an experiment."""

_MAX_CELLS = 200
"""Maximum number of cached columns of an experiment."""

_COUNT = "SELECT count(*) FROM trials WHERE experiment_id = ?"
_NEW = "SELECT id, hparams FROM trials WHERE experiment_id = ? AND id > ? ORDER BY id"


class _HparamColumns(msgspec.Struct):
    """Hyperparameters of the trials of an experiment."""

    leaves: dict[int, Mapping[str, Value]] = msgspec.field(default_factory=dict)
    """Hyperparameters by trial, oldest first."""
    orders: OrderedDict[str, list[SortPosition]] = msgspec.field(default_factory=OrderedDict)
    """Sort keys of all trials, by column including a leading ``-``."""
    held: OrderedDict[bytes, frozenset[int]] = msgspec.field(default_factory=OrderedDict)
    """Trials that match a condition, by the condition."""
    cells: OrderedDict[str, msgspec.Raw] = msgspec.field(default_factory=OrderedDict)
    """JSON of a hyperparameter's values in all trials, by its name."""
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """Lock of this experiment only, so that requests for others are not blocked."""

    def refresh(self, connection: Connection, experiment_id: int) -> None:
        """Add new trials; reload all if trials were deleted."""
        last = next(reversed(self.leaves), 0)
        rows = raw_rows(connection, _NEW, (experiment_id, last))
        ((count,),) = raw_rows(connection, _COUNT, (experiment_id,))
        if count < len(self.leaves) + len(rows):
            self.leaves.clear()
            self._clear()
            rows = raw_rows(connection, _NEW, (experiment_id, 0))
        if rows:
            self.leaves |= {trial_id: decode_hparams(text) for trial_id, text in rows}
            self._clear()

    def _clear(self) -> None:
        self.orders.clear()
        self.held.clear()
        self.cells.clear()

    def column(self, name: str) -> msgspec.Raw:
        """Return the JSON of a hyperparameter in all trials, oldest first."""
        encoded = self.cells.get(name)
        if encoded is None:
            values = [to_json_value(hparams.get(name)) for hparams in self.leaves.values()]
            encoded = self.cells[name] = msgspec.Raw(msgspec.json.encode(values))
            if len(self.cells) > _MAX_CELLS:
                self.cells.popitem(last=False)
        return encoded

    def check(self, requested: Sequence[tuple[str, str]]) -> None:
        """Check that each hyperparameter exists in some trial.

        Args:
            requested: Columns, each with the request parameter that named it.

        Raises:
            ConfigError: Lists all unknown hyperparameters.
        """
        all_hparams = self.leaves.values()
        wrong = [
            (column, what)
            for column, what in requested
            if not any(column.removeprefix(PREFIX) in hparams for hparams in all_hparams)
        ]
        names = dict.fromkeys(name for hparams in all_hparams for name in hparams) if wrong else {}
        raise_problems([check_column(column, names, what) for column, what in wrong])

    def holding(self, conditions: Sequence[Condition]) -> frozenset[int]:
        """Return the trials for which all conditions hold."""
        matching = [self._holding(condition) for condition in conditions]
        return frozenset.intersection(*matching) if matching else frozenset(self.leaves)

    def _holding(self, condition: Condition) -> frozenset[int]:
        key = msgspec.json.encode(condition)
        if key not in self.held:
            column, sign, operand = condition
            name, matches = column.removeprefix(PREFIX), condition_matcher(sign, operand)
            items = self.leaves.items()
            self.held[key] = frozenset(
                trial_id for trial_id, hparams in items if matches(hparams.get(name))
            )
            if len(self.held) > _MAX_ORDERS:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]

    def order(self, sort: str) -> list[SortPosition]:
        """Return the sorted keys of all trials."""
        order = self.orders.get(sort)
        if order is None:
            name = sort.removeprefix("-").removeprefix(PREFIX)
            sign = -1 if sort.startswith("-") else 1
            items = self.leaves.items()
            order = sorted(
                sort_position(hparams.get(name), trial_id, sign) for trial_id, hparams in items
            )
            self.orders[sort] = order
            if len(self.orders) > _MAX_ORDERS:
                self.orders.popitem(last=False)
        self.orders.move_to_end(sort)
        return order


class TrialOrders:
    """Cache of sort orders of recently viewed experiments; thread-safe."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, _HparamColumns] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def _columns_of(self, connection: Connection, experiment_id: int) -> Iterator[_HparamColumns]:
        with self._lock:
            columns = self._cached.setdefault(experiment_id, _HparamColumns())
            self._cached.move_to_end(experiment_id)
            if len(self._cached) > _MAX_EXPERIMENTS:
                self._cached.popitem(last=False)
        with columns.lock:
            columns.refresh(connection, experiment_id)
            yield columns

    def leaves(self, connection: Connection, experiment_id: int) -> dict[int, Mapping[str, Value]]:
        """Return the hyperparameters of all trials by trial, oldest first."""
        with self._columns_of(connection, experiment_id) as columns:
            return dict(columns.leaves)

    def columns(
        self,
        connection: Connection,
        experiment_id: int,
        ids: Sequence[int],
        names: Sequence[str] | None,
    ) -> dict[str, msgspec.Raw] | None:
        """Return hyperparameters of an experiment's trials as columns of JSON.

        Args:
            connection: Database connection.
            experiment_id: Id of the experiment.
            ids: Expected trials, oldest first.
            names: Names of the hyperparameters; None for all.

        Returns:
            JSON by name; None if trials were added or deleted since.

        Raises:
            ConfigError: If no trial has one of them.
        """
        with self._columns_of(connection, experiment_id) as columns:
            if len(ids) != len(columns.leaves) or (
                ids and ids[-1] != next(reversed(columns.leaves))
            ):
                return None
            if names is None:
                names = list(
                    dict.fromkeys(name for hparams in columns.leaves.values() for name in hparams)
                )
            else:
                columns.check([(PREFIX + name, "column") for name in names])
            return {name: columns.column(name) for name in names}

    def holding(
        self, connection: Connection, experiment_id: int, conditions: Sequence[Condition]
    ) -> frozenset[int]:
        """Return the trials of an experiment for which all conditions hold.

        Args:
            connection: Database connection.
            experiment_id: Id of the experiment.
            conditions: Conditions on hyperparameters.

        Raises:
            ConfigError: If no trial has one of the hyperparameters.
        """
        with self._columns_of(connection, experiment_id) as columns:
            columns.check([(column, "where") for column, _, _ in conditions])
            return columns.holding(conditions)

    def choose(
        self,
        connection: Connection,
        experiment_id: int,
        sort: str,
        after: str | None,
        limit: int,
        *,
        conditions: Sequence[Condition],
        only: frozenset[int] | None = None,
    ) -> SelectedPage:
        """Return a page of the trials of an experiment.

        Args:
            connection: Database connection.
            experiment_id: Id of the experiment.
            sort: A hyperparameter, ``hparams.NAME``; a leading ``-`` sorts in descending order.
            after: Cursor from the previous page.
            limit: Maximum number of trials of a page.
            conditions: Conditions on hyperparameters that all must hold.
            only: Ids of the trials to consider; None for all.

        Raises:
            ConfigError: If no trial has one of the hyperparameters, or the cursor is invalid.
        """
        column = sort.removeprefix("-")
        name = column.removeprefix(PREFIX)
        sign = -1 if sort.startswith("-") else 1
        position = None if after is None else cursor_position(after, sign)
        with self._columns_of(connection, experiment_id) as columns:
            columns.check([(column, "sort"), *((item[0], "where") for item in conditions)])
            order = columns.order(sort)
            if conditions or only is not None:
                matching = columns.holding(conditions)
                matching = matching if only is None else matching & only
                order = [item for item in order if abs(item[1]) in matching]
            first = 0 if position is None else bisect_right(order, position)
            page = order[first : first + limit]
            ids = [abs(trial_id) for _, trial_id in page]
            cursor = None
            if first + limit < len(order):
                cursor = write_cursor(columns.leaves[ids[-1]].get(name), ids[-1])
            return SelectedPage(ids, len(order), cursor)
