"""Histograms of the time that requests take, by route."""

from bisect import bisect_left
from time import perf_counter

from starlette.types import Scope

__all__ = ["BOUNDS_S", "Histogram", "RequestTimes"]

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets in seconds; the last bucket has none."""
_WAITING = ("/work", "/directive", "/events")
"""Ends of routes whose requests wait for a change, however fast the server is."""


class Histogram:
    """Durations of the requests of one route."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Number of requests in each bucket."""
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a request."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


class RequestTimes:
    """Durations of requests since the start of the server; used on the event loop's thread."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = {}
        """By method and path of the route."""

    def note(self, scope: Scope, start: float) -> None:
        """Count a request that ends now.

        Requests without a route, and those that wait for a change, are not counted.

        Args:
            scope: Scope of the request after its route was found.
            start: Its start, from ``time.perf_counter``.
        """
        path: str | None = getattr(scope.get("route"), "path", None)
        if path is None or path.endswith(_WAITING):
            return
        key = scope["method"], path
        histogram = self.histograms.get(key)
        if histogram is None:
            histogram = self.histograms[key] = Histogram()
        histogram.add(perf_counter() - start)
