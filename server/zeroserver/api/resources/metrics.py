"""Metrics of a trial."""

from zeroserver.api.rows import Num, Resource

__all__ = ["Curve", "MetricName", "MetricNames", "Metrics"]


class MetricName(Resource, frozen=True):
    """A metric that a trial has reported."""

    group: str
    name: str


class MetricNames(Resource, frozen=True):
    """Answer of ``metric-names``."""

    names: list[MetricName]


class Curve(Resource, frozen=True):
    """A metric over the steps."""

    group: str
    """`training`, `validation` or `system`."""
    name: str
    """Of the metric."""
    points: list[tuple[int, Num]]
    """Step and value; the mean of its neighbours where points were merged."""
    band: list[tuple[int, Num, Num, Num]] | None
    """Step, minimum, maximum and mean of the points that were merged; null when none were."""
    time_s: list[float] | None = None
    """When each point was reported, in seconds since 1970; null unless `times` asks for it."""


class Metrics(Resource, frozen=True):
    """Answer of ``metrics``."""

    metrics: list[Curve]
