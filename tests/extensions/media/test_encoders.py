"""Tables, texts, histograms, audio and files, read back by other libraries."""

import io
import json
import logging
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from zerolab.errors import ConfigError
from zerolab.extensions.media.encoders import ENCODERS

pytestmark = pytest.mark.needs_extension("media")


def table(value: Any, columns: list[str] | None = None) -> dict[str, Any]:
    (item,) = ENCODERS["table"](value, columns)
    content: dict[str, Any] = json.loads(item.content)
    assert item.metadata["rows"] == len(content["rows"])
    return content


COLUMNS = {"name": ["cat", "dog"], "recall": np.array([0.5, np.nan])}
ROWS = {"columns": ["name", "recall"], "rows": [["cat", 0.5], ["dog", "NaN"]]}


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        pytest.param(
            pd.DataFrame({"name": ["cat", "dog"], "recall": [0.5, np.nan]}), None, id="pd"
        ),
        pytest.param(COLUMNS, None, id="columns"),
        pytest.param(
            [("cat", np.float32(0.5)), ("dog", float("nan"))], ["name", "recall"], id="rows"
        ),
        pytest.param(
            [{"name": "cat", "recall": torch.tensor(0.5)}, {"recall": np.nan, "name": "dog"}],
            None,
            id="dicts",
        ),
    ],
)
def test_tables_of_all_kinds_are_equal(value: Any, columns: list[str] | None) -> None:
    assert table(value, columns) == ROWS


def test_table_keeps_its_first_rows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert len(table({"x": range(10_001)})["rows"]) == 10_000
    assert "has 10001 rows: only the first 10000 are stored" in caplog.text


def test_histogram_counts_all_finite_values() -> None:
    values = np.random.default_rng(0).normal(2.0, 3.0, 1000)
    values[:3] = [np.nan, np.inf, -np.inf]
    (item,) = ENCODERS["histogram"](torch.from_numpy(values).reshape(10, 100), 32)
    assert item.content is None
    finite = values[3:]
    counts, edges = np.histogram(finite, 32)
    assert item.metadata["counts"] == counts.tolist()
    np.testing.assert_allclose(item.metadata["edges"], edges, rtol=1e-8)
    assert item.metadata["not_finite"] == 3
    np.testing.assert_allclose(item.metadata["mean"], finite.mean())
    np.testing.assert_allclose(item.metadata["std"], finite.std())
    (same,) = ENCODERS["histogram"]((counts, edges), 64)
    assert same.metadata["counts"] == counts.tolist()


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(np.array([[0, 32767], [-32767, 5]], np.int16), id="integers"),
        pytest.param(torch.tensor([[0.0, 1.0], [-2.0, 5 / 32767]]), id="floats"),
    ],
)
def test_audio_is_a_wav_file(samples: Any) -> None:
    (item,) = ENCODERS["audio"](samples, 8000, "a tone")
    with wave.open(io.BytesIO(item.content)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 2)
        frames = np.frombuffer(file.readframes(2), "<i2")
    assert frames.tolist() == [0, 32767, -32767, 5]
    assert item.metadata == {"caption": "a tone", "sample_rate": 8000, "seconds": 0.0}


def test_files_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "report.v2.html"
    path.write_text("<h1>")
    (item,) = ENCODERS["file"](path)
    assert (item.suffix, item.metadata, item.size) == (".html", {"file": path.name}, 4)
    (text,) = ENCODERS["text"]("na\u00efve \ud800")
    assert text.content == b"na\xc3\xafve ?"


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("table", ([[1, 2]], None), "columns: must be the names of the columns"),
        ("table", ([[1, 2]], ["a"]), "each row must have 1 values"),
        ("table", (7, None), "must be a data frame"),
        ("table", ({"a": [1], "b": []}, None), "columns: must have the same length"),
        ("histogram", ([float("nan")], 8), "must have finite values"),
        ("histogram", ([1.0], 0), "bins: must be 1 to 512, got 0"),
        ("histogram", (["a"], 8), "must be numbers"),
        ("histogram", (([1], [1]), 8), "must be counts and one more edge"),
        ("audio", ([0.0], None), "sample_rate: must be samples a second"),
        ("audio", ("tone.txt", None), "must be a file that exists, with suffix"),
        ("audio", (np.zeros((2, 9)), 8000), "shape: must be"),
        ("text", (7,), "must be a str, got int"),
        ("file", ("missing",), "must be the path of a file"),
    ],
)
def test_unusable_values_are_named(kind: str, values: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ENCODERS[kind](*values)
