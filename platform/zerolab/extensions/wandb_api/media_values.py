"""Media of wandb: values with options, which a run reports as media of Zerolab."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolab.reports.media_reports import MediaReports

__all__ = ["Audio", "Histogram", "Html", "Image", "Media", "Table"]


class Media:
    """Value of ``wandb.log`` that is no number."""

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it under a name.

        Args:
            target: Receiver of the report.
            name: Name in ``wandb.log``.
            step: Step of the report.
        """
        raise NotImplementedError


class Image(Media):
    """Image, as ``wandb.Image``.

    Args:
        data_or_path: Array, tensor, PIL image, matplotlib figure, or the path of a file.
        caption: A text.
        unused: Options without a counterpart, such as ``mode``, ``masks`` and ``boxes``; ignored.
    """

    def __init__(self, data_or_path: Any, caption: str | None = None, **unused: Any) -> None:
        del unused
        self.data: Any = data_or_path.data if isinstance(data_or_path, Image) else data_or_path
        self.caption = caption

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it; see :meth:`Media.report`."""
        target.report_image(name, self.data, step, caption=self.caption)


class Audio(Media):
    """Audio, as ``wandb.Audio``.

    Args:
        data_or_path: Array of samples, or the path of a file.
        sample_rate: Samples per second; needed for an array.
        caption: A text.
    """

    def __init__(
        self, data_or_path: Any, sample_rate: int | None = None, caption: str | None = None
    ) -> None:
        self.data, self.sample_rate, self.caption = data_or_path, sample_rate, caption

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it; see :meth:`Media.report`."""
        target.report_audio(
            name, self.data, step, sample_rate=self.sample_rate, caption=self.caption
        )


class Html(Media):
    """HTML, as ``wandb.Html``; reported as a text.

    Args:
        data: Text, open file, or the path of a file that ends with ``.html``.
        inject: Ignored.
        data_is_not_path: Whether ``data`` is a text even if it looks like a path.
    """

    def __init__(self, data: Any, inject: bool = True, data_is_not_path: bool = False) -> None:  # noqa: FBT001, FBT002 - as wandb
        del inject
        if hasattr(data, "read"):
            data = data.read()
        elif not data_is_not_path and str(data).endswith(".html") and Path(str(data)).is_file():
            data = Path(str(data)).read_text(encoding="utf-8")
        self.html = str(data)

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it; see :meth:`Media.report`."""
        target.report_text(name, self.html, step)


class Histogram(Media):
    """Histogram, as ``wandb.Histogram``.

    Args:
        sequence: Numbers.
        np_histogram: Counts and edges, instead of ``sequence``.
        num_bins: Number of bins of ``sequence``.
    """

    def __init__(self, sequence: Any = None, np_histogram: Any = None, num_bins: int = 64) -> None:
        self.values = sequence if np_histogram is None else np_histogram
        self.num_bins = num_bins

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it; see :meth:`Media.report`."""
        target.report_histogram(name, self.values, step, bins=min(self.num_bins, 512))


class Table(Media):
    """Table, as ``wandb.Table``; media in its cells are shown as their captions.

    Args:
        columns: Names of the columns.
        data: Rows, or an array of two dimensions.
        rows: The same as ``data``.
        dataframe: Data frame of pandas, instead of both.
        unused: Options without a counterpart; ignored.
    """

    def __init__(
        self,
        columns: Sequence[Any] | None = None,
        data: Any = None,
        rows: Any = None,
        dataframe: Any = None,
        **unused: Any,
    ) -> None:
        del unused
        if dataframe is None and hasattr(data, "itertuples"):
            dataframe = data
        if dataframe is not None:
            columns = list(dataframe.columns)
            data = list(dataframe.itertuples(index=False, name=None))
        data = rows if data is None else data
        self.data = [list(row) for row in (data if data is not None else [])]
        width = len(self.data[0]) if self.data else 3
        names = ["Input", "Output", "Expected"] if width == 3 else range(width)
        self.columns = [str(name) for name in (columns if columns is not None else names)]

    def add_data(self, *row: Any) -> None:
        """Add a row.

        Args:
            row: A value for each column.

        Raises:
            ValueError: If there are more or fewer values than columns.
        """
        if len(row) != len(self.columns):
            msg = f"row: must have {len(self.columns)} values, got {len(row)}"
            raise ValueError(msg)
        self.data.append(list(row))

    def add_column(self, name: str, data: Any) -> None:
        """Add a column.

        Args:
            name: Name of the column.
            data: A value for each row.
        """
        self.columns.append(name)
        if not self.data:
            self.data = [[] for _ in data]
        for row, value in zip(self.data, data, strict=True):
            row.append(value)

    def get_column(self, name: str) -> list[Any]:
        """Return the values of a column.

        Args:
            name: Name of the column.
        """
        position = self.columns.index(name)
        return [row[position] for row in self.data]

    def report(self, target: MediaReports, name: str, step: int) -> None:
        """Report it; see :meth:`Media.report`."""
        rows = [[_cell(value) for value in row] for row in self.data]
        target.report_table(name, rows, step, columns=self.columns)


def _cell(value: Any) -> Any:
    if isinstance(value, Media):
        return getattr(value, "caption", None) or type(value).__name__
    return value
