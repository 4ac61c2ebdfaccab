"""Runs of other trackers, in the form that the server imports.

A source is a module that an entry point of the group ``zerolab.import_sources`` names. It has two
functions: ``locate(path)`` returns the locations of the runs below a path, an empty list if there
are none, and ``read(location, root)`` returns the :class:`ImportedRun` of one.
"""

import hashlib
import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zerolab.contract.media import MediaRecord, media_name_problem
from zerolab.contract.messages import wire_number
from zerolab.registry import Registry

if TYPE_CHECKING:
    from zerolab.reports.media_files import MediaItem

__all__ = ["SOURCES", "ImportedRun", "metric_group", "run_name"]

SOURCES: Registry[Any] = Registry("zerolab.import_sources", {})
"""Import sources by name."""

_MAX_STEP = 2**53
_LINE_POINTS = 10_000
_GROUPS = ("training", "validation", "system")
_VALIDATION = re.compile(r"(?:^|[/_. -])(?:val|valid|validation|eval|evaluation|test)(?:$|[/_. -])")


def metric_group(name: str) -> tuple[str, str]:
    """Return the group of another tracker's metric, and its name there.

    ``validation/NAME`` and the like select a group. Otherwise a metric whose name contains ``val``,
    ``eval`` or ``test`` as a word is in the group validation, all others in training.

    Args:
        name: Name of the metric in the other tracker.
    """
    group, _, rest = name.partition("/")
    if group in _GROUPS and rest:
        return group, rest
    return "validation" if _VALIDATION.search(name.lower()) else "training", name


class _Series:
    def __init__(self) -> None:
        self.steps, self.values, self.times = array("q"), array("d"), array("d")


class ImportedRun:
    """One run of a tracker: hyperparameters, labels and points.

    Args:
        source: Name of the tracker.
        identity: Text that identifies the run within the tracker; the same run is imported once.
        name: Name of the experiment.
        created_at: Start of the run, in seconds since 1970; None for the time of its first point.
    """

    def __init__(
        self, source: str, identity: str, name: str, created_at: float | None = None
    ) -> None:
        self.source = source
        self.name = name
        self.created_at = created_at
        self.hparams: dict[str, Any] = {}
        self.labels: list[str] = []
        self.description = ""
        self.omitted: Counter[str] = Counter()
        """Number of items of each kind that cannot be imported."""
        self.header: dict[str, Any] | None = None
        """Header of a metrics file, whose ``records`` are sent as they are."""
        self.records = b""
        self.record_points = 0
        self.media: list[MediaRecord] = []
        self.contents: dict[str, bytes | Path] = {}
        """Contents of the media, by digest."""
        self.key = hashlib.sha256(f"{source}\0{identity}".encode()).hexdigest()
        self._series: dict[tuple[str, str], _Series] = {}
        self._by_name: dict[str, _Series] = {}

    def add(self, name: str, step: int, value: float, time: float) -> None:
        """Add a point; ``validation/NAME`` and the like select a group.

        A metric whose name contains ``val``, ``eval`` or ``test`` as a word is in the group
        validation, all others in training. Their names do not change.
        """
        if not 0 <= step < _MAX_STEP:
            self.omitted["points with a negative step"] += 1
            return
        series = self._by_name.get(name)
        if series is None:
            series = self._series.setdefault(metric_group(name), _Series())
            self._by_name[name] = series
        series.steps.append(step)
        series.values.append(value)
        series.times.append(time if 0 <= time < _YEAR_10000 else 0.0)

    def add_medium(
        self, name: str, step: int, items: "Sequence[MediaItem]", time: float, first: int = 0
    ) -> None:
        """Add media of one name and step, whose positions begin with ``first``."""
        if not 0 <= step < _MAX_STEP or media_name_problem(name):
            self.omitted["media with an invalid name or step"] += len(items)
            return
        for position, item in enumerate(items, first):
            content = item.content
            if isinstance(content, Path):
                with content.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                digest = "" if content is None else hashlib.sha256(content).hexdigest()
            if content is not None:
                self.contents[digest] = content
            self.media.append(
                MediaRecord(
                    name, step, item.type, digest, item.size, time, position, item.suffix,
                    item.metadata,
                )
            )  # fmt: skip

    @property
    def points(self) -> int:
        """Number of points."""
        return self.record_points + sum(len(series.steps) for series in self._series.values())

    @property
    def names(self) -> list[str]:
        """Groups and names of the metrics."""
        return sorted(f"{group}/{name}" for group, name in self._series)

    def content(self) -> bytes:
        """Return the body of the request that imports the run."""
        imported = {"source": self.source, "key": self.key}
        first = min((series.times[0] for series in self._series.values()), default=0.0)
        config = {
            "name": self.name,
            "labels": self.labels,
            "description": self.description,
            "hyperparameters": self.hparams,
        }
        header = self.header or {
            "kind": "header",
            "format": 1,
            "config": config,
            "hparams": self.hparams,
            "trial_seed": 0,
            "time": first if self.created_at is None else self.created_at,
        }
        header = {**header, "config": {**header["config"], "imported": imported}}
        encoder = msgspec.json.Encoder()
        lines = [encoder.encode(header)]
        for (group, name), series in self._series.items():
            for first_point in range(0, len(series.steps), _LINE_POINTS):
                chosen = slice(first_point, first_point + _LINE_POINTS)
                line = {
                    "kind": "series",
                    "group": group,
                    "name": name,
                    "steps": series.steps[chosen].tolist(),
                    "values": _numbers(series.values[chosen].tolist()),
                    "times": series.times[chosen].tolist(),
                }
                lines.append(encoder.encode(line))
        lines += map(encoder.encode, self.media)
        return b"\n".join(lines) + b"\n" + self.records


_YEAR_10000 = 253_402_300_800


def _numbers(values: list[float]) -> list[float | str]:
    if math.isfinite(math.fsum(values) if all(map(math.isfinite, values)) else math.nan):
        return list(values)
    return [wire_number(value) for value in values]


def run_name(directory: Path, root: Path) -> str:
    """Return the name of a run's directory below the path that is imported."""
    relative = directory.resolve().relative_to(root.resolve())
    return str(relative) if relative.parts else root.resolve().name
