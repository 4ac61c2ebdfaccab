"""Conversion of reported values into media, by kind."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolab.errors import ConfigError
from zerolab.extensions.media.audio import audio_items
from zerolab.extensions.media.histograms import histogram_items
from zerolab.extensions.media.images import image_items
from zerolab.extensions.media.tables import table_items
from zerolab.reports.media_files import MediaItem

__all__ = ["ENCODERS"]

_MAX_TEXT = 10_000_000


def _text_items(text: Any) -> list[MediaItem]:
    if not isinstance(text, str):
        raise ConfigError("text", [f"must be a str, got {type(text).__name__}"])
    content = text[:_MAX_TEXT].encode("utf-8", "replace")
    return [MediaItem("text", content, ".txt", {"characters": len(text)})]


def _file_items(path: Any) -> list[MediaItem]:
    if not isinstance(path, str | Path) or not Path(path).is_file():
        problem = "must be the path of a file; report each file of a directory"
        raise ConfigError("file", [f"{problem}, got {str(path)[:200]!r}"])
    source = Path(path)
    suffix = source.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,16}", source.suffix) else ""
    return [MediaItem("file", source, suffix, {"file": source.name})]


ENCODERS: Mapping[str, Callable[..., list[MediaItem]]] = {
    "image": image_items,
    "table": table_items,
    "text": _text_items,
    "histogram": histogram_items,
    "audio": audio_items,
    "file": _file_items,
}
"""Kind to a function of the value and the options of its ``report_`` method."""
