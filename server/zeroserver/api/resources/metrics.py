"""Metrics of a trial."""

from zeroserver.api.rows import Num, Resource

__all__ = ["Curve", "MetricName", "MetricNames", "Metrics"]


class MetricName(Resource, frozen=True):
    """Metric that a trial has reported."""

    group: str
    name: str


class MetricNames(Resource, frozen=True):
    """Response of ``metric-names``."""

    names: list[MetricName]


class Curve(Resource, frozen=True):
    """Metric over the steps."""

    group: str
    """`training`, `validation` or `system`."""
    name: str
    """Name of the metric."""
    points: list[tuple[int, Num]]
    """Step and value; the value is a mean if points were merged."""
    band: list[tuple[int, Num, Num, Num]] | None
    """Step, minimum, maximum and mean of merged points; null if none were merged."""
    time_s: list[float] | None = None
    """Time of each point in seconds since 1970; null unless requested by `times`."""
    values_removed: bool = False
    """Whether most of its values were removed some days after the end of the experiment
    (`retention_policy.metric_retention_days`); points then represent up to 1,024 steps each."""


class Metrics(Resource, frozen=True):
    """Response of ``metrics``."""

    metrics: list[Curve]
