"""Validation of stored records: time, numbers and points."""

import math
from collections.abc import Iterable

from zerolab.contract.messages import MetricsRecord, plain_number
from zerolab.errors import ConfigError
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.store.points import MAX_STEP, Point

__all__ = ["PointReader", "check_times", "stored_number"]

_NAMES_LOOKED_AT = 10_000
"""Maximum number of names of a record that are checked, in addition to known names."""
_YEAR_10000 = 253_402_300_800


class PointReader:
    """Converter of the records of a report or import into points.

    Args:
        names: Metric names of the unit of work.
        trial_id: Trial of the records.
    """

    def __init__(self, names: MetricNameService, trial_id: int) -> None:
        self._names = names
        self._trial_id = trial_id
        self._ids: dict[str, dict[str, int]] = {}
        """Group to its accepted names that were looked up, with their ids."""
        self.nan: tuple[str, int] | None = None
        """Name and step of the first NaN that was read, except of system metrics."""

    def read(self, record: MetricsRecord) -> list[Point]:
        """Convert a record into points; metrics with names that are not accepted are skipped.

        Raises:
            ConfigError: If it has an invalid value.
        """
        if not 0 <= record.steps < MAX_STEP:
            raise ConfigError("metrics", [f"steps: must be 0 to 2^53, got {record.steps}"])
        steps, when, values = record.steps, record.time, record.values
        ids = self._ids.get(record.group)
        if ids is None or not values.keys() <= ids.keys():
            values, ids = self._admit(record)
        return [
            (
                ids[name],
                steps,
                value if type(value) is float and value == value else self._number(record, name),  # noqa: PLR0124 - false for NaN
                when,
            )
            for name, value in values.items()
        ]

    def _number(self, record: MetricsRecord, name: str) -> float | None:
        number = stored_number(name, record.values[name])
        if number is None and self.nan is None and record.group != "system":
            self.nan = name, record.steps
        return number

    def _admit(self, record: MetricsRecord) -> tuple[dict[str, float | str], dict[str, int]]:
        """Return the values of a record with accepted names, and the ids of the names."""
        names, trial_id = self._names, self._trial_id
        values = record.values
        if len(values) > _NAMES_LOOKED_AT:
            values = names.shorten(trial_id, record, _NAMES_LOOKED_AT)
        ids = names.work.orchestrator.metrics.keys.known(record.group)
        reported = names.reported(trial_id)
        new = [name for name in values if ids.get(name) not in reported]
        if new:
            omitted = len(record.values) - len(values)
            accepted = names.admit(trial_id, record.group, new, omitted=omitted)
            refused = set(new).difference(accepted)
            values = {name: value for name, value in values.items() if name not in refused}
        known_ids = self._ids.setdefault(record.group, {})
        known_ids.update((name, ids[name]) for name in values)
        return values, known_ids


def check_times(times: Iterable[float]) -> None:
    """Validate times.

    Raises:
        ConfigError: If one is not a finite number of seconds since 1970, before the year 10000.
    """
    for time in times:
        if not 0 <= time < _YEAR_10000:  # NaN too
            problem = f"time: must be in seconds since 1970, before the year 10000, got {time}"
            raise ConfigError("record", [problem])


def stored_number(name: str, value: float | str) -> float | None:
    """Convert a value to its stored form; None for NaN.

    Raises:
        ConfigError: If it is not a number.
    """
    try:
        number = plain_number(value)
    except ValueError as error:
        raise ConfigError("metrics", [f"{name[:100]}: {error}"]) from None
    return None if math.isnan(number) else number
