"""Objects of the Python client; tests/docs runs the examples of their docstrings."""

import copy
import math
import pickle
from array import array
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from zerolab.client import Client
from zerolab.client.objects import Experiment, MetricsTable, ObjectList, Trial
from zerolab.client.objects.metrics_table import MetricSeries, read_series
from zerolab.contract.messages import LENGTH_BYTES, MetricsColumns
from zerolab.errors import ConfigError, ConflictError, NotFoundError, WaitTimeoutError

OFFLINE: Any = None
SCRIPT = {"train.py": "print('training')", "data/values.bin": b"\x00\xff"}


def points(*columns: list[float]) -> tuple[Any, Any, Any]:
    steps, values, times = columns
    return array("q", map(int, steps)), array("d", values), array("d", times)


SERIES = [
    MetricSeries(1, "training", "loss", *points([1, 2], [0.5, math.nan], [1.5, 2.0])),
    MetricSeries(2, "validation", "accuracy", *points([10], [-math.inf], [1_700_000_000.25])),
]


def config(**changes: Any) -> dict[str, Any]:
    hparams = {"lr": {"type": "categorical", "vals": [0.1, 0.2, 0.3]}}
    searcher = {"name": "grid", "metric": "loss", "max_length": {"batches": 10}}
    fields = {"name": "objects", "entrypoint": "python train.py", "hyperparameters": hparams}
    return fields | {"searcher": searcher} | changes


def test_attributes_are_typed() -> None:
    fields = {
        "id": 1,
        "state": "COMPLETED",
        "best_validation": "NaN",
        "slot_seconds": 3,
        "created_at": "2026-11-28T04:00:00.500Z",
        "ended_at": None,
    }
    trial = Trial(OFFLINE, fields)
    assert math.isnan(trial.best_validation or 0.0)
    assert isinstance(trial.slot_seconds, float)
    assert trial.created_at == datetime(2026, 11, 28, 4, 0, 0, 500_000, UTC)
    assert trial.ended_at is None
    assert trial.has_ended
    assert trial["best_validation"] == "NaN"
    assert msgspec.json.decode(msgspec.json.encode(trial)) == fields
    with pytest.raises(AttributeError, match="'Trial' object has no attribute 'loss'"):
        _ = trial.loss
    assert {"state", "metrics", "slot_seconds"} <= set(dir(trial))


def test_copy_has_only_fields() -> None:
    trial = Trial(OFFLINE, {"id": 1, "hparams": {"lr": 0.1}})
    for other in (copy.deepcopy(trial), pickle.loads(pickle.dumps(trial))):
        assert type(other) is dict
        assert other == trial


def test_html_is_escaped() -> None:
    trials = ObjectList(
        Trial(OFFLINE, {"id": number, "state": "<b>", "hparams": {"<i>": 0.12345}})
        for number in range(60)
    )
    for html in (trials._repr_html_(), trials[0]._repr_html_()):
        assert "&lt;b&gt;" in html
        assert "&lt;i&gt;=0.1235" in html
        assert "<b>" not in html
    assert "and 10 more" in trials._repr_html_()


def test_list_to_pandas() -> None:
    pytest.importorskip("pandas")
    fields = {"id": 1, "hparams": {"lr": 0.1, "model": {"width": 8}}, "best_validation": "Infinity"}
    created = {"created_at": "2026-11-28T04:00:00Z"}
    frame = ObjectList([Trial(OFFLINE, fields | created)]).to_pandas()
    assert frame["hparams.model.width"].tolist() == [8]
    assert frame["best_validation"].tolist() == [math.inf]
    assert frame["created_at"].dt.year.tolist() == [2026]


def rows(columns: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in zip(*columns, strict=True)]


def test_metrics_table_columns() -> None:
    table = MetricsTable(SERIES)
    assert (len(table), table.names) == (3, [("training", "loss"), ("validation", "accuracy")])
    columns = table.columns()
    assert columns["trial_id"].tolist() == [1, 1, 2]
    assert columns["value"][0] == 0.5
    assert math.isnan(columns["value"][1])
    assert columns["value"][2] == -math.inf
    assert str(columns["time"][2]) == "2023-11-14T22:13:20.250000"
    empty = MetricsTable([])
    assert len(empty) == 0
    assert {name: len(values) for name, values in empty.columns().items()} == dict.fromkeys(
        columns, 0
    )


def test_truncated_export_is_an_error() -> None:
    content = b""
    for part in SERIES:
        arrays = (part.steps.tobytes(), part.values.tobytes(), part.times.tobytes())
        frame = msgspec.msgpack.encode(
            MetricsColumns(part.trial_id, part.group, part.name, *arrays)
        )
        content += len(frame).to_bytes(LENGTH_BYTES, "little") + frame
    pieces = [content[at : at + 3] for at in range(0, len(content), 3)]
    assert str(list(read_series(pieces))) == str(SERIES)  # NaN differs from itself
    for length in (2, len(content) - 1):
        with pytest.raises(ConfigError, match="the export ended early"):
            list(read_series([content[:length]]))


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
@pytest.mark.parametrize("series", [SERIES, []], ids=["points", "empty"])
def test_metrics_table_to_frame(library: str, series: list[MetricSeries]) -> None:
    pytest.importorskip(library)
    table = MetricsTable(series)
    if library == "pandas":
        frame = table.to_pandas()
        names, steps = frame["name"].tolist(), frame["step"].tolist()
        assert frame["name"].dtype == "category"
    elif library == "polars":
        polars_frame = table.to_polars()
        names, steps = polars_frame["name"].to_list(), polars_frame["step"].to_list()
    else:
        arrow = table.to_arrow()
        names, steps = arrow["name"].to_pylist(), arrow["step"].to_pylist()
        assert str(arrow.schema.field("time").type) == "timestamp[us, tz=UTC]"
    assert names == ["loss", "loss", "accuracy"][: len(table)]
    assert steps == [1, 2, 10][: len(table)]


def test_metrics_table_reports_unreadable_series() -> None:
    damaged = MetricSeries(3, "training", "loss", *points([], [], []), "a page is damaged")
    with pytest.raises(ConfigError, match="trial 3 training loss: a page is damaged"):
        MetricsTable([*SERIES, damaged])


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(ConfigError, match="polars: must be installed; run `pip install polars`"):
        MetricsTable(SERIES).to_polars()


@pytest.mark.processes
def test_experiment_without_agent(client: Client) -> None:
    experiment = client.submit(SCRIPT, config(labels=["a"]))
    assert isinstance(experiment, Experiment)
    assert {row["path"] for row in client.get(f"/experiments/{experiment.id}/files")["files"]} == {
        *SCRIPT
    }
    with pytest.raises(WaitTimeoutError, match=r"has not ended after 0 s \(ACTIVE, 0 % done: .+"):
        experiment.wait(timeout_s=0)
    with pytest.raises(NotFoundError, match="no trial of experiment 1 has a result: its state is"):
        experiment.best_trial()
    with pytest.raises(NotFoundError, match="experiment 1 has no best checkpoint: "):
        experiment.best_checkpoint()
    assert len(experiment.metrics()) == 0
    assert list(experiment.logs(follow=False)) == []
    matching = experiment.trials(where=[("hparams.lr", ">", 0.15)], sort="-hparams.lr", limit=1)
    assert [trial.hparams for trial in matching] == [{"lr": 0.3}]
    with pytest.raises(ConfigError, match=r"hparams\.unknown"):
        experiment.trials(where=[("hparams.unknown", "=", 1)])
    assert experiment.pause().state == "PAUSED"
    assert experiment.change(notes="n").notes == "n"
    killed = experiment.kill().wait()
    assert killed is experiment
    assert (killed.state, killed.has_ended) == ("CANCELED", True)
    with pytest.raises(ConflictError):
        experiment.activate()
    assert matching[0].refresh().state == "CANCELED"
    with pytest.raises(ConfigError, match="metric: must be a reported metric"):
        experiment.plot()


def test_submit_checks_its_arguments() -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="config: must be a mapping, got str"):
        client.submit(SCRIPT, "experiment.yaml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'\.\./train.py': "):
        client.submit({"../train.py": ""}, config())
    with pytest.raises(ConfigError, match=r"source: must be a directory, .* got int"):
        client.submit(3, config())  # type: ignore[arg-type]
