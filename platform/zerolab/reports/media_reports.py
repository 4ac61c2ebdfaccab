"""Methods of contexts that report images, tables, texts, histograms, audio and files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolab.errors import ConfigError
from zerolab.registry import PARTS
from zerolab.reports.reporter import Reporter

__all__ = ["MediaReports"]


class MediaReports:
    """Base class of the contexts that report media.

    Every rank may report; only the chief's reports count. A report returns when the medium is on
    the local disk. It is uploaded in the background, and neither the server nor the storage can
    delay or fail the training. Media that cannot be stored are discarded with a warning.
    """

    def _media_reporter(self) -> Reporter | None:
        """Return the run's reporter; None on other ranks than the chief."""
        raise NotImplementedError

    def _media_step(self) -> int:
        """Return the step of media that are reported without one."""
        raise NotImplementedError

    def report_image(
        self, name: str, image: Any, steps_completed: int | None = None, *, caption: Any = None
    ) -> None:
        """Report an image, or several of one name.

        Another report of the same name and step adds images to them.

        Args:
            name: Name of the image; the same at each step.
            image: Array of numpy or torch of shape (H, W), (H, W, C) or (C, H, W), with C of 1, 3
                or 4, and values 0 to 255 as integers or 0 to 1 as floats (others are clipped); an
                image of PIL, a figure of matplotlib, the path of a PNG, JPEG, GIF or WebP file; or
                a sequence or batch of at most 1,000 of them.
            steps_completed: Batches completed; those of the last report by default.
            caption: Text, or one text for each image.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     pixels = torch.rand(3, 32, 32)
            ...     context.train.report_image("sample", pixels, 100, caption="a cat")
        """
        self._report("image", name, steps_completed, image, caption)

    def report_table(
        self,
        name: str,
        table: Any,
        steps_completed: int | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Report a table, such as the results of each class.

        At most 10,000 rows are stored; further rows are left out with a warning.

        Args:
            name: Name of the table; the same at each step.
            table: Data frame of pandas or polars, a list of rows, a list of dicts, or a dict of
                columns.
            steps_completed: Batches completed; those of the last report by default.
            columns: Names of the columns of a list of rows.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     rows = [{"class": "cat", "recall": 0.9}, {"class": "dog", "recall": 0.8}]
            ...     context.train.report_table("recall", rows, 100)
        """
        self._report("table", name, steps_completed, table, columns)

    def report_text(self, name: str, text: str, steps_completed: int | None = None) -> None:
        """Report a text, such as generated samples.

        Args:
            name: Name of the text; the same at each step.
            text: The text.
            steps_completed: Batches completed; those of the last report by default.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_text("sample", "Once upon a time ...", 100)
        """
        self._report("text", name, steps_completed, text)

    def report_histogram(
        self, name: str, values: Any, steps_completed: int | None = None, *, bins: int = 64
    ) -> None:
        """Report the distribution of values, such as weights or gradients.

        Args:
            name: Name of the histogram; the same at each step.
            values: Array or sequence of numbers; or counts and edges as ``numpy.histogram``
                returns them. Values that are not finite are counted separately.
            steps_completed: Batches completed; those of the last report by default.
            bins: Number of bins of equal width, 1 to 512.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.train.report_histogram("weights", torch.randn(1000), 100)
        """
        self._report("histogram", name, steps_completed, values, bins)

    def report_audio(
        self,
        name: str,
        audio: Any,
        steps_completed: int | None = None,
        *,
        sample_rate: int | None = None,
        caption: str | None = None,
    ) -> None:
        """Report audio, such as generated speech.

        Args:
            name: Name of the audio; the same at each step.
            audio: Array of shape (samples,) or (samples, channels), with values -1 to 1 as floats
                or as 16-bit integers; or the path of a WAV, MP3, OGG or FLAC file.
            steps_completed: Batches completed; those of the last report by default.
            sample_rate: Samples per second; needed for an array.
            caption: A text.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> import math
            >>> wave = [math.sin(0.1 * sample) for sample in range(8000)]
            >>> with zerolab.core.init() as context:
            ...     context.train.report_audio("tone", wave, 100, sample_rate=8000)
        """
        self._report("audio", name, steps_completed, audio, sample_rate, caption)

    def report_file(self, name: str, path: str | Path, steps_completed: int | None = None) -> None:
        """Report a file of any kind, for download.

        The file is copied before this returns. Use a checkpoint for weights: it is complete or does
        not exist, and has a retention policy.

        Args:
            name: Name of the file; the same at each step.
            path: The file.
            steps_completed: Batches completed; those of the last report by default.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.

        Example:
            >>> from pathlib import Path
            >>> size = Path("report.html").write_text("<h1>Results</h1>")
            >>> with zerolab.core.init() as context:
            ...     context.train.report_file("report", "report.html", 100)
        """
        self._report("file", name, steps_completed, path)

    def _report(self, kind: str, name: str, steps_completed: int | None, *values: Any) -> None:
        reporter = self._media_reporter()
        if reporter is None:
            return
        steps = self._media_step() if steps_completed is None else steps_completed
        encoders = PARTS.find("media")
        if encoders is None:
            reporter.warn_of_media("media: the extension zerolab.extensions.media is not installed")
            return
        try:
            items = encoders.ENCODERS[kind](*values)
        except Exception as error:  # noqa: BLE001 - whatever the values of others raise
            problem = error.problems[0] if isinstance(error, ConfigError) else repr(error)
            reporter.warn_of_media(f"{kind} {name!r}: {problem}")
            return
        reporter.report_media(name, steps, items)
