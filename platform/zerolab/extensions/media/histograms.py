"""Histograms as edges and counts of bins."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerolab.errors import ConfigError
from zerolab.extensions.media.arrays import to_numpy
from zerolab.reports.media_files import MediaItem

__all__ = ["histogram_items"]

_MAX_BINS = 512


def histogram_items(values: Any, bins: int = 64) -> list[MediaItem]:
    """Return the item of a histogram; its metadata is the content.

    Args:
        values: Numbers, or counts and edges of bins.
        bins: Number of bins of equal width.

    Raises:
        ConfigError: If there are no finite numbers, or too many bins.
    """
    if isinstance(values, tuple) and len(values) == 2:
        counts, edges = (_numbers(part) for part in values)
        if counts.ndim != 1 or edges.shape != (len(counts) + 1,):
            problem = "must be counts and one more edge, as of numpy.histogram"
            raise ConfigError("histogram", [f"{problem}, got {counts.shape} and {edges.shape}"])
        metadata: dict[str, object] = {}
    else:
        numbers = _numbers(values).ravel()
        finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
        if not finite.size:
            raise ConfigError("histogram", ["must have finite values, got none"])
        _check_bins(bins)
        counts, edges = np.histogram(finite, bins=bins)
        metadata = {
            "count": int(numbers.size),
            "mean": float(finite.mean(dtype=np.float64)),
            "std": float(finite.std(dtype=np.float64)),
            "not_finite": int(numbers.size - finite.size),
        }
    _check_bins(len(counts))
    metadata |= {"counts": counts.tolist(), "edges": [_short(edge) for edge in edges.tolist()]}
    return [MediaItem("histogram", None, "", metadata)]


def _numbers(values: Any) -> NDArray[Any]:
    try:
        array = to_numpy(values)
    except TypeError as error:
        raise ConfigError("histogram", [str(error)]) from error
    return array.astype(np.float64) if array.dtype == np.float16 else array


def _check_bins(bins: int) -> None:
    if not 1 <= bins <= _MAX_BINS:
        raise ConfigError("histogram", [f"bins: must be 1 to {_MAX_BINS}, got {bins}"])


def _short(edge: float) -> float:
    """Return an edge with 9 digits, which is more than a picture shows."""
    return float(f"{edge:.9g}") if math.isfinite(edge) else edge
