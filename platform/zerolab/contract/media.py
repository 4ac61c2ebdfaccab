"""Media of trials: kinds, limits, and the rules for what a run reports.

Media are images, tables, texts, histograms, audio and files at a step of a trial. Their content is
in the checkpoint storage, under the SHA-256 of the content; a report has only that digest.
"""

import re
from typing import Any, Literal

import msgspec

from zerolab.contract.names import MAX_METRIC_NAME, text_problem

__all__ = [
    "CONTENT_TYPES",
    "DIGEST",
    "MAX_MEDIA",
    "MAX_MEDIA_BYTES",
    "MAX_POSITIONS",
    "MediaRecord",
    "MediaType",
    "download_name",
    "media_name_problem",
    "media_problem",
]

MediaType = Literal["image", "table", "text", "histogram", "audio", "file"]

MAX_MEDIA = 20_000
"""Most media of one trial."""
MAX_MEDIA_BYTES = 5 * 10**9
"""Most bytes of one trial's media."""
MAX_POSITIONS = 1000
"""Most media that one name has at one step."""
_MAX_METADATA = 32 * 1024
_MAX_STEP = 2**53

DIGEST = re.compile(r"[0-9a-f]{64}")
"""SHA-256 in hexadecimal digits."""
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,16}){0,2}")

CONTENT_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".flac": "audio/flac",
}
"""File suffixes that browsers may show, as they execute nothing; SVG and HTML could."""


class MediaRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="media"):
    """An image, table, text, histogram, audio or file at a step; its content is in the storage."""

    name: str
    steps: int
    """Batches (optimizer steps) completed; at least 0."""
    type: MediaType
    digest: str
    """SHA-256 of the content; empty if the metadata is all there is, as for a histogram."""
    size: int
    """Size of the content in bytes."""
    time: float
    position: int = 0
    """Index among the media of the same name and step."""
    suffix: str = ""
    """Suffix of a file with the content, such as ``.png``."""
    metadata: dict[str, Any] = {}
    """Caption, width and height, sample rate, the bins of a histogram, ..."""


def media_name_problem(name: str) -> str | None:
    """Return the problem of the name of a medium, or None.

    Example:
        >>> media_name_problem("validation/misclassified")
        >>> media_name_problem("")
        "must have 1 to 200 characters, got ''"
    """
    if not 0 < len(name) <= MAX_METRIC_NAME:
        shown = f"{name[:50]!r}... ({len(name)} characters)" if name else "''"
        return f"must have 1 to {MAX_METRIC_NAME} characters, got {shown}"
    return text_problem(name)


def media_problem(record: MediaRecord) -> str | None:
    """Return the problem of a reported medium, or None."""
    checks = (
        (media_name_problem(record.name) is None, "name", "a text of 1 to 200 characters"),
        (0 <= record.steps < _MAX_STEP, "steps", "0 to 2^53"),
        (0 <= record.position < MAX_POSITIONS, "position", f"0 to {MAX_POSITIONS - 1}"),
        (not record.digest or DIGEST.fullmatch(record.digest), "digest", "a SHA-256"),
        (0 <= record.size <= MAX_MEDIA_BYTES, "size", f"0 to {MAX_MEDIA_BYTES} bytes"),
        (_SUFFIX.fullmatch(record.suffix), "suffix", "a file suffix such as '.png'"),
    )
    for valid, field, condition in checks:
        if not valid:
            return f"{field}: must be {condition}, got {str(getattr(record, field))[:50]!r}"
    size = len(msgspec.json.encode(record.metadata))
    if size > _MAX_METADATA:
        return f"metadata: must have at most {_MAX_METADATA} bytes as JSON, got {size}"
    return None


def download_name(name: str, step: int, position: int, suffix: str, metadata: Any) -> str:
    """Return the file name of a downloaded medium: the reported file's, or one of its step.

    Example:
        >>> download_name("validation/digits", 100, 0, ".png", {})
        'validation_digits-100.png'
        >>> download_name("report", 100, 0, ".html", {"file": "report.html"})
        'report.html'
    """
    original = metadata.get("file") if isinstance(metadata, dict) else None
    if isinstance(original, str) and original:
        return _file_name(original)
    number = f"-{position}" if position else ""
    return f"{_file_name(name)}-{step}{number}{suffix}"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "file"
