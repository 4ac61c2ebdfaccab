"""Limit on the metric names of a trial, and handling of metrics over it.

A name costs a row, roll-ups at every level and a curve in every view. A trial with a step or sample
id in its names would fill the database and slow down all other users. Metrics over the limit, and
metrics with an invalid name, are discarded with a warning in the trial's log. The other metrics of
the report are stored. The searcher's metric is always accepted.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice

from sqlalchemy import Connection

from zerolab.contract.messages import MetricsRecord
from zerolab.contract.names import metric_name_problem
from zerolab.errors import ConfigError
from zeroserver.orchestrator.caches import MetricCache
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.store.database import raw_rows
from zeroserver.store.points import SHIFTS
from zeroserver.store.rows import TrialRow

__all__ = ["MetricNameService", "unused_names"]

_TRIALS = 1000
"""Maximum number of trials whose names are cached."""
_SHOWN = 3
"""Maximum number of discarded names in a warning."""
_REPORTED = f"SELECT DISTINCT key_id FROM rollups WHERE trial_id = ? AND shift = {SHIFTS[-1]}"  # noqa: S608 - our own words


class MetricNameService(Service):
    """Limits and counts the metric names that trials use."""

    @property
    def cache(self) -> MetricCache:
        """Metric names that outlive the unit of work."""
        return self.work.orchestrator.metrics

    def reported(self, trial_id: int) -> set[int]:
        """Return the ids of the metrics that a trial has reported."""
        keys = self.cache.reported.get(trial_id)
        if keys is None:
            keys = {key for (key,) in self.work.raw(_REPORTED, (trial_id,))}
            while len(self.cache.reported) >= _TRIALS:
                self.cache.reported.pop(next(iter(self.cache.reported)))
            self.cache.reported[trial_id] = keys
        return keys

    def shorten(self, trial_id: int, record: MetricsRecord, limit: int) -> dict[str, float | str]:
        """Return the values of a huge record that are candidates for storing.

        These are the first ones, those with known names, and the searcher's metric. Checking each
        of a million names would block all other requests.
        """
        values = record.values
        selected = dict(islice(values.items(), limit))
        selected |= {
            name: values[name] for name in self.cache.keys.known(record.group) if name in values
        }
        searcher_metric = self._searcher_metric(trial_id, record.group)
        if searcher_metric is not None and searcher_metric in values:
            selected[searcher_metric] = values[searcher_metric]
        return selected

    def _searcher_metric(self, trial_id: int, group: str) -> str | None:
        """Return the name of the searcher's metric if it belongs to the group."""
        if group != "validation" or trial_id in self.work.orchestrator.deletions.importing:
            return None
        return self.work.experiment_of(self.work.find(TrialRow, trial_id)).metric or None

    def admit(
        self,
        trial_id: int,
        group: str,
        names: Sequence[str],
        *,
        omitted: int = 0,
    ) -> list[str]:
        """Accept new metric names of a trial up to its limit; warn in its log about the others.

        Args:
            trial_id: Trial that reports. A trial being imported has no row and no log: for it,
                exceeding the limit is an error.
            group: Group of the metrics.
            names: Names that the trial has not reported before.
            omitted: Number of further names in the report.

        Returns:
            The names to store; they have ids.

        Raises:
            ConfigError: If the name of the group is invalid, or an import has too many names.
        """
        importing = trial_id in self.work.orchestrator.deletions.importing
        reported = self.reported(trial_id)
        limit = self.work.settings.limits.metric_names
        searcher_metric = self._searcher_metric(trial_id, group)
        accepted, discarded, problems = [], [], []
        free = limit - len(reported)
        for name in names:
            if name == searcher_metric or (free > 0 and metric_name_problem(name) is None):
                accepted.append(name)
                free -= 1
            elif free > 0:
                problems.append(name)
            else:
                discarded.append(name)
        self.work.undo.append(partial(_forget, self.work.orchestrator, trial_id))
        self.cache.keys.create(self.work, group, accepted)
        ids = self.cache.keys.known(group)
        reported.update(ids[name] for name in accepted)
        self.cache.admitted.update(ids[name] for name in accepted)
        warning = []
        if problems:
            warning.append(
                f"metric name: {metric_name_problem(problems[0])}; "
                f"{len(problems)} metric(s) of one "
                "report were discarded, the others are stored"
            )
        if discarded:
            count = len(discarded) + omitted
            warning.append(
                f"metric names: must be at most {limit:,} in a trial, "
                f"got {count} more in one report "
                f"({_shown(discarded)}); these metrics are discarded, the others are stored: "
                "use the same "
                "names at every step, or start the server with --metric-names"
            )
        if importing:  # no log for a warning; only the limit is an error
            if discarded:
                raise ConfigError("metrics file", warning)
            return accepted
        for text in warning:
            self.warn_once(trial_id, text)
        return accepted

    def forget_unused(self, unused: set[int]) -> None:
        """Delete unused metric names, except names that a trial has started to use since.

        Args:
            unused: Ids of the names.
        """
        deleted = unused.difference(
            self.cache.admitted,
            *self.cache.reported.values(),
        )
        self.work.many("DELETE FROM metric_keys WHERE id = ?", [(key,) for key in deleted])
        self.cache.keys.forget(deleted)

    def warn_once(self, trial_id: int, text: str) -> None:
        """Write a warning into a trial's log, once for each run and kind of problem."""
        trial = self.work.find(TrialRow, trial_id)
        key = (trial.run_id or 0, text.partition(":")[0])
        if key in self.cache.warned:
            return
        while len(self.cache.warned) >= _TRIALS:
            self.cache.warned.pop(next(iter(self.cache.warned)))
        self.cache.warned[key] = None
        self.work.undo.append(partial(self.cache.warned.pop, key, None))
        self.work.log(trial.experiment_id, trial_id, trial.run_id, text, "WARNING")


def unused_names(connection: Connection) -> set[int]:
    """Return the ids of metric names without points; in any thread."""
    used = raw_rows(connection, f"SELECT DISTINCT key_id FROM rollups WHERE shift = {SHIFTS[-1]}")  # noqa: S608
    stored = raw_rows(connection, "SELECT id FROM metric_keys")
    return {key for (key,) in stored}.difference(key for (key,) in used)


def _forget(orchestrator: Orchestrator, trial_id: int) -> None:
    orchestrator.metrics.reported.pop(trial_id, None)


def _shown(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(repr(name[:50]) for name in names[:_SHOWN]) + more
