"""Files of exported metrics, read with the libraries of others."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.helpers import make_spec
from zerolab.client import Client
from zerolab.errors import ConfigError, ConflictError, NotFoundError, UnreachableError
from zerolab.reports.reporter import METRICS_FILE, Reporter
from zeroserver.extensions.metrics_export.files import write_file, write_parquet, write_tensorboard

pytestmark = pytest.mark.processes


def imported(client: Client, directory: Path) -> int:
    """Import a run with three values, one of them NaN; return the experiment."""
    reporter = Reporter(make_spec(directory, hparams={"lr": 0.1, "layers": [1, 2], "note": None}))
    reporter.report_metrics("training", 1, {"loss": 0.5})
    reporter.report_metrics("training", 2, {"loss": math.nan})
    reporter.report_metrics("validation", 2, {"accuracy": 0.75})
    reporter.close(10.0)
    return client.import_metrics((directory / METRICS_FILE).read_bytes()).id


def test_export_formats(client: Client, tmp_path: Path) -> None:
    """Parquet and TensorBoard files have the points of ``metrics()``."""
    experiment_id = imported(client, tmp_path / "run")
    expected = client.experiment(experiment_id).metrics()
    assert len(expected) == 3
    columns = expected.columns()

    events = tmp_path / "events"
    assert write_tensorboard(client, experiment_id, events) == 3
    check_events(events / "trial-1", columns["time"].astype("int64") / 1e6)
    with pytest.raises(ConflictError, match="trial-1: must not exist"):
        write_tensorboard(client, experiment_id, events)

    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "metrics.parquet"
    assert write_parquet(client, experiment_id, path) == 3
    table = parquet.read_table(path)
    assert table.column_names == list(columns)
    for name in ("trial_id", "step", "group", "name"):
        assert table[name].to_pylist() == columns[name].tolist()
    values = table["value"].to_pylist()
    assert (values[0], values[2]) == (0.5, 0.75)
    assert math.isnan(values[1])
    assert table["time"].cast("int64").to_pylist() == columns["time"].astype("int64").tolist()
    with pytest.raises(NotFoundError):
        write_parquet(client, 7, tmp_path / "missing.parquet")
    assert [file.name for file in tmp_path.glob("*.parquet*")] == ["metrics.parquet"]


def test_failed_export_leaves_the_former_file(tmp_path: Path) -> None:
    """A lost connection neither destroys an earlier export nor leaves half of a new one."""

    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise UnreachableError("the server does not respond")

    path = tmp_path / "metrics.csv"
    write_file([b"a", b"b"], path)
    with pytest.raises(UnreachableError):
        write_file(pieces(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]
    assert path.read_bytes() == b"ab"
    with pytest.raises(ConfigError, match="must be a file, got a directory"):
        write_file([b"a"], tmp_path)


def check_events(directory: Path, times: list[float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    accumulator = EventAccumulator(str(directory)).Reload()
    scalars = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    assert sorted(scalars) == ["training/loss", "validation/accuracy"]
    assert [event.step for event in scalars["training/loss"]] == [1, 2]
    assert math.isnan(scalars["training/loss"][1].value)
    (accuracy,) = scalars["validation/accuracy"]
    assert (accuracy.step, accuracy.value) == (2, 0.75)
    assert accuracy.wall_time == pytest.approx(times[2])
    content = accumulator.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    assert metadata.PLUGIN_NAME == "hparams"
    hparams = data.session_start_info.hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["layers"].string_value == "[1,2]"
