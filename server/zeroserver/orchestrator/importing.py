"""A run without a server, brought in later: an experiment that has ended, with one trial."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import RowMapping

from zerolab.contract.wire import MetricsRecord, Record
from zerolab.errors import ConfigError
from zerolab.reports.file import FORMAT, MetricsHeader
from zeroserver.orchestrator.desk import World, find, save, touch
from zeroserver.orchestrator.ingest import best_of, check_time, read_points
from zeroserver.states import ExperimentState, TrialState
from zeroserver.store.database import Transaction
from zeroserver.store.points import store_points
from zeroserver.store.schema import experiments, trials

__all__ = ["MetricsLog", "import_run", "parse"]

_CHUNK = 10_000


class MetricsLog(msgspec.Struct, frozen=True):
    """The content of a metrics file."""

    header: MetricsHeader
    records: list[Record]


def parse(content: bytes) -> MetricsLog:
    """Read a metrics file: a header, then one record a line.

    A last line that was cut, since its writer died, is left out.

    Raises:
        ConfigError: If it is not a metrics file.
    """
    return MetricsLog(_header(content), list(_records(content)))


def _header(content: bytes) -> MetricsHeader:
    first = content.partition(b"\n")[0]
    try:
        header = msgspec.json.decode(first, type=MetricsHeader)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        problem = f"line 1: must be the header of a metrics file ({error})"
        raise ConfigError("metrics file", [problem]) from None
    if header.format != FORMAT:
        problem = f"format: must be {FORMAT}, got {header.format}; use the version that wrote it"
        raise ConfigError("metrics file", [problem])
    check_time(header.time)
    return header


def _records(content: bytes) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    lines = content.split(b"\n")
    for number, line in enumerate(lines[1:-1], start=2):  # behind the last \n: nothing, or a cut
        try:
            record = decoder.decode(line)
            check_time(record.time)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ConfigError("metrics file", [f"line {number}: {error}"]) from None
        except ConfigError as error:
            raise ConfigError("metrics file", [f"line {number}: {error.problems[0]}"]) from None
        yield record


def import_run(world: World, transaction: Transaction, log: MetricsLog) -> int:
    """Store a run's metrics as an experiment of their own; return its id."""
    experiment_id, trial_id = _make(world, transaction, log)
    experiment = find(transaction, experiments, experiment_id)
    told = [record for record in log.records if isinstance(record, MetricsRecord)]
    for start in range(0, len(told), _CHUNK):
        new = [
            point
            for record in told[start : start + _CHUNK]
            for point in read_points(world, transaction, record)
        ]
        store_points(transaction, trial_id, new)
    _summarise(transaction, experiment, trial_id, told)
    touch(transaction, "experiment", experiment_id, experiment_id)
    return experiment_id


def _make(world: World, transaction: Transaction, log: MetricsLog) -> tuple[int, int]:
    config: Mapping[str, Any] = log.header.config
    block = config.get("searcher")
    searcher: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    last = max((record.time for record in log.records), default=log.header.time)
    times = {"created_at": log.header.time, "started_at": log.header.time, "ended_at": last}
    text = msgspec.json.encode(config).decode()
    row = {
        "name": str(config.get("name") or "imported").replace("\0", "")[:255],
        "state": ExperimentState.COMPLETED,
        "config": text,
        "raw_config": text,
        "searcher_name": "single",
        "metric": str(searcher.get("metric") or "loss").replace("\0", ""),
        "smaller_is_better": int(bool(searcher.get("smaller_is_better", True))),
        "seed": log.header.trial_seed,
        "slots": 1,
        "priority": 42,
        "searcher_done": 1,
        "progress": 1.0,
        "num_trials": 1,
        **times,
    }
    insert = experiments.insert().values(row).returning(experiments.c.id)
    experiment_id = int(transaction.connection.execute(insert).scalar_one())
    trial = {
        "experiment_id": experiment_id,
        "request_id": 1,
        "state": TrialState.COMPLETED,
        "hparams": msgspec.json.encode(log.header.hparams).decode(),
        "seed": log.header.trial_seed,
        "progress": 1.0,
        **times,
    }
    made = transaction.connection.execute(trials.insert().values(trial).returning(trials.c.id))
    return experiment_id, int(made.scalar_one())


def _summarise(
    transaction: Transaction, experiment: RowMapping, trial_id: int, told: list[MetricsRecord]
) -> None:
    steps = max((record.steps for record in told if record.group != "system"), default=0)
    values: dict[str, Any] = {"steps_completed": steps}
    best: tuple[float, int] | None = None
    for record in told:
        if record.group == "validation" and experiment["metric"] in record.values:
            value, best = best_of(experiment, record, best)
            values["latest_validation"] = value
    if best is not None:
        values |= {"best_validation": best[0], "best_steps": best[1]}
        save(
            transaction,
            experiments,
            experiment["id"],
            best_validation=best[0],
            best_trial_id=trial_id,
        )
    save(transaction, trials, trial_id, **values)
