"""What may be stored of a record: its time, its numbers, its points."""

import math
from collections.abc import Iterable

from zerolab.contract.wire import MetricsRecord, plain_number
from zerolab.errors import ConfigError
from zeroserver.orchestrator.desk import World
from zeroserver.orchestrator.ingest.names import (
    admit_names,
    reported_keys,
    shorten_record,
)
from zeroserver.store.database import Transaction
from zeroserver.store.points import MAX_STEP, Point

__all__ = ["check_times", "read_points", "stored_number"]

_NAMES_LOOKED_AT = 10_000
"""Names of a record that are looked at, besides those that are known already."""
_YEAR_10000 = 253_402_300_800


def read_points(
    world: World, transaction: Transaction, trial_id: int, record: MetricsRecord
) -> list[Point]:
    """Turn a record into points; metrics whose names the trial may not use are left out.

    Raises:
        ConfigError: If it holds what cannot be stored.
    """
    if not 0 <= record.steps < MAX_STEP:
        raise ConfigError("metrics", [f"steps: must be 0 to 2^53, got {record.steps}"])
    steps, when = record.steps, record.time
    ids = world.keys.known(record.group)
    values = record.values
    if len(values) > _NAMES_LOOKED_AT:
        values = shorten_record(world, transaction, trial_id, record, _NAMES_LOOKED_AT)
    reported = reported_keys(world, transaction, trial_id)
    new = [name for name in values if ids.get(name) not in reported]
    if new:
        omitted = len(record.values) - len(values)
        accepted = admit_names(world, transaction, trial_id, record.group, new, omitted=omitted)
        refused = set(new).difference(accepted)
        values = {name: value for name, value in values.items() if name not in refused}
    return [
        (
            ids[name],
            steps,
            value if type(value) is float and value == value else stored_number(name, value),  # noqa: PLR0124 - false for NaN
            when,
        )
        for name, value in values.items()
    ]


def check_times(times: Iterable[float]) -> None:
    """Refuse times that are on no calendar.

    Raises:
        ConfigError: If one is not a finite number of seconds since 1970, before the year 10000.
    """
    for time in times:
        if not 0 <= time < _YEAR_10000:  # NaN too
            problem = f"time: must be in seconds since 1970, before the year 10000, got {time}"
            raise ConfigError("record", [problem])


def stored_number(name: str, value: float | str) -> float | None:
    """Return a value as it is stored; None for NaN.

    Raises:
        ConfigError: If it is no number.
    """
    try:
        number = plain_number(value)
    except ValueError as error:
        raise ConfigError("metrics", [f"{name[:100]}: {error}"]) from None
    return None if math.isnan(number) else number
