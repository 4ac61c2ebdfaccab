"""Metric points as columns, for data frames."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from zerolab.client.libraries import library
from zerolab.contract.messages import LENGTH_BYTES, MetricsColumns
from zerolab.errors import ConfigError
from zerolab.formatting import html_table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import polars as pl
    import pyarrow as pa

__all__ = ["MetricSeries", "MetricsTable", "read_series"]


class MetricSeries(msgspec.Struct, frozen=True):
    """Points of one metric of a trial, as the server exports them."""

    trial_id: int
    group: str | None
    name: str | None
    steps: "array[int]"
    values: "array[float]"
    times: "array[float]"
    problem: str | None = None
    """Why points are missing, if the server cannot read them."""


def read_series(pieces: Iterable[bytes]) -> Iterator[MetricSeries]:
    """Parse the columnar format of a metrics export.

    Args:
        pieces: Content, divided anywhere.

    Yields:
        Points of one metric each.

    Raises:
        ConfigError: If the content ends within the points of a metric.
    """
    decode = msgspec.msgpack.Decoder(MetricsColumns).decode
    rest = bytearray()
    for piece in pieces:
        rest += piece
        start = 0
        while len(rest) - start >= LENGTH_BYTES:
            first = start + LENGTH_BYTES
            end = first + int.from_bytes(rest[start:first], "little")
            if end > len(rest):
                break
            frame = decode(rest[first:end])
            yield MetricSeries(
                frame.trial_id, frame.group, frame.name, array("q", frame.steps),
                array("d", frame.values), array("d", frame.times), frame.problem,
            )  # fmt: skip
            start = end
        del rest[:start]
    if rest:
        raise ConfigError("metrics", ["the export ended early; run the command again"])


class MetricsTable:
    """Points of metrics: one row for each trial, group, name and step.

    Args:
        series: Points by trial and metric.

    Raises:
        ConfigError: If the server could not read some of the points.

    Example:
        >>> client = zerolab.Client()
        >>> table = client.experiment(1).metrics(group="validation")
        >>> len(table), table.names
        (2, [('validation', 'loss')])
        >>> table.columns()["value"].tolist()
        [0.01, 0.02]
    """

    def __init__(self, series: Iterable[MetricSeries]) -> None:
        self._series = [part for part in series if part.steps or part.problem]
        problems = [
            f"trial {part.trial_id} {part.group or ''} {part.name or ''}: {part.problem}"
            for part in self._series
            if part.problem
        ]
        if problems:
            raise ConfigError("metrics", problems)

    def __len__(self) -> int:
        return sum(self._counts)

    @property
    def _counts(self) -> list[int]:
        return [len(part.steps) for part in self._series]

    @property
    def names(self) -> list[tuple[str, str]]:
        """Groups and names of its metrics, sorted."""
        return sorted({(str(part.group), str(part.name)) for part in self._series})

    def columns(self) -> "Mapping[str, np.ndarray[Any, Any]]":
        """Return the points as arrays of equal length.

        Returns:
            ``trial_id``, ``group``, ``name``, ``step``, ``value`` (float64, with NaN and
            infinities) and ``time`` (datetime64, UTC).

        Example:
            >>> client = zerolab.Client()
            >>> columns = client.experiment(1).metrics(group="validation").columns()
            >>> columns["step"].tolist()
            [10, 10]
        """
        import numpy as np

        def repeat(values: list[Any], kind: Any) -> Any:
            return np.repeat(np.array(values, dtype=kind), self._counts)

        steps, values, times = array("q"), array("d"), array("d")
        for part in self._series:
            steps.extend(part.steps)
            values.extend(part.values)
            times.extend(part.times)
        seconds = np.frombuffer(times, dtype=np.float64) if times else np.empty(0)
        return {
            "trial_id": repeat([part.trial_id for part in self._series], np.int64),
            "group": repeat([part.group for part in self._series], object),
            "name": repeat([part.name for part in self._series], object),
            "step": np.array(steps, dtype=np.int64),
            "value": np.array(values, dtype=np.float64),
            "time": (seconds * 1e6).round().astype("datetime64[us]"),
        }

    def to_pandas(self) -> "pd.DataFrame":
        """Return the points as a data frame.

        Returns:
            Frame with the columns of :meth:`columns`; ``group`` and ``name`` are categories.

        Raises:
            ConfigError: If pandas is not installed.

        Example:
            >>> client = zerolab.Client()
            >>> frame = client.experiment(1).metrics(group="training").to_pandas()
            >>> frame.pivot(index="step", columns="trial_id", values="value").loc[10].tolist()
            [0.01, 0.02]
        """
        pandas = library("pandas", "to_pandas")
        frame: pd.DataFrame = pandas.DataFrame(dict(self.columns()))
        return frame.astype({"group": "category", "name": "category"})

    def to_polars(self) -> "pl.DataFrame":
        """Return the points as a data frame of polars.

        Returns:
            Frame with the columns of :meth:`columns`.

        Raises:
            ConfigError: If polars is not installed.

        Example:
            >>> client = zerolab.Client()
            >>> frame = client.experiment(1).metrics(group="validation").to_polars()
            >>> frame["value"].to_list()
            [0.01, 0.02]
        """
        polars = library("polars", "to_polars")
        columns = {
            name: values.tolist() if values.dtype == object else values
            for name, values in self.columns().items()
        }
        kinds = {"group": polars.Categorical, "name": polars.Categorical}
        frame: pl.DataFrame = polars.DataFrame(columns, schema_overrides=kinds)
        return frame

    def to_arrow(self) -> "pa.Table":
        """Return the points as a table of pyarrow.

        Returns:
            Table with the columns of :meth:`columns`; ``group`` and ``name`` are dictionaries, and
            ``time`` has the time zone UTC.

        Raises:
            ConfigError: If pyarrow is not installed.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).metrics(group="validation").to_arrow().column_names
            ['trial_id', 'group', 'name', 'step', 'value', 'time']
        """
        import numpy as np

        pyarrow = library("pyarrow", "to_arrow")
        columns: dict[str, Any] = dict(self.columns())
        texts = {
            "group": [str(part.group) for part in self._series],
            "name": [str(part.name) for part in self._series],
        }
        for name, values in texts.items():
            encoded = pyarrow.array(values, pyarrow.string()).dictionary_encode()
            indices = np.repeat(encoded.indices.to_numpy(), self._counts)
            columns[name] = pyarrow.DictionaryArray.from_arrays(indices, encoded.dictionary)
        columns["time"] = pyarrow.array(columns["time"], pyarrow.timestamp("us", tz="UTC"))
        table: pa.Table = pyarrow.table(columns)
        return table

    def __repr__(self) -> str:
        return f"MetricsTable({len(self)} points of {len(self.names)} metrics)"

    def _repr_html_(self) -> str:
        counts: dict[str, int] = {}
        for part in self._series:
            key = f"{part.group} {part.name}"
            counts[key] = counts.get(key, 0) + len(part.steps)
        rows = {name: f"{count:,} points" for name, count in sorted(counts.items())}
        return html_table(f"{len(self):,} points", rows)
