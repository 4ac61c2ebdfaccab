"""Images as PNG, or as the file that they come from.

Pillow is no dependency: eight bits per channel without interlacing need 20 lines of PNG.
"""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerolab.errors import ConfigError
from zerolab.extensions.media.arrays import is_torch, to_numpy
from zerolab.reports.media_files import MediaItem

__all__ = ["image_items"]

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""Channels to the color type of PNG."""
_MAX_PIXELS = 64_000_000
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF87a": ".gif",
    b"GIF89a": ".gif",
}


def image_items(image: Any, caption: Any = None) -> list[MediaItem]:
    """Return the items of an image, of a sequence of images, or of a batch.

    Raises:
        ConfigError: If it is none.
    """
    images = _images(image)
    single = caption is None or isinstance(caption, str)
    captions = [caption] * len(images) if single else list(caption)
    if len(captions) != len(images):
        problem = f"must be one text, or {len(images)}, got {len(captions)}"
        raise ConfigError("image", [f"caption: {problem}"])
    return [_item(*pair) for pair in zip(images, captions, strict=True)]


def _images(image: Any) -> list[Any]:
    if isinstance(image, str | Path) or hasattr(image, "save") or _figure(image) is not None:
        return [image]
    if getattr(image, "ndim", None) == 4:
        return list(image)
    if isinstance(image, Sequence) and not _is_number_rows(image):
        return list(image)
    return [image]


def _is_number_rows(value: Any) -> bool:
    """Return whether nested lists hold the pixels of one image."""
    first = value[0] if len(value) else None
    inner = first[0] if isinstance(first, list | tuple) and first else None
    return isinstance(first, list | tuple) and isinstance(inner, int | float | list | tuple)


def _item(image: Any, caption: Any) -> MediaItem:
    metadata: dict[str, object] = {} if caption is None else {"caption": str(caption)[:2000]}
    if isinstance(image, str | Path):
        content = _read(Path(image))
        return MediaItem("image", content, _suffix(content, image), metadata)
    figure = _figure(image)
    if figure is not None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return MediaItem("image", buffer.getvalue(), ".png", metadata)
    if hasattr(image, "save") and hasattr(image, "convert"):  # PIL
        image = np.asarray(image if image.mode in {"L", "RGB", "RGBA"} else image.convert("RGBA"))
    pixels = _pixels(image)
    metadata |= {"width": pixels.shape[1], "height": pixels.shape[0]}
    return MediaItem("image", _png(pixels), ".png", metadata)


def _figure(value: Any) -> Any:
    """Return the figure of matplotlib that a value is, or belongs to; else None."""
    if type(value).__module__.partition(".")[0] not in {"matplotlib", "seaborn"}:
        return None
    return next(
        (item for item in (value, getattr(value, "figure", None)) if hasattr(item, "savefig")), None
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"{path}: must be a file that can be read ({error.strerror})"
        raise ConfigError("image", [problem]) from error


def _suffix(content: bytes, path: str | Path) -> str:
    for magic, suffix in _MAGIC.items():
        if content.startswith(magic):
            return suffix
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return ".webp"
    problem = "must be a PNG, JPEG, GIF or WebP file; report other files with report_file"
    raise ConfigError("image", [f"{path}: {problem}"])


def _pixels(image: Any) -> NDArray[np.uint8]:
    """Return an image as (H, W, C) of bytes."""
    try:
        array = to_numpy(image)
    except TypeError as error:
        wanted = "an array, an image of PIL, a figure of matplotlib or a path"
        raise ConfigError(
            "image", [f"must be {wanted}, got {type(image).__name__} ({error})"]
        ) from error
    shape = array.shape
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3:
        first, last = shape[0] in _COLOR_TYPES, shape[2] in _COLOR_TYPES
        if first and (is_torch(image) or not last):
            array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in _COLOR_TYPES or 0 in array.shape:
        problem = "must be (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels"
        raise ConfigError("image", [f"shape: {problem}, got {tuple(shape)}"])
    if array.shape[0] * array.shape[1] > _MAX_PIXELS:
        problem = f"must have at most {_MAX_PIXELS:,} pixels, got shape {tuple(shape)}"
        raise ConfigError("image", [problem])
    if array.dtype.kind == "b":
        array = array * 255
    elif array.dtype.kind == "f":
        array = np.fmax(array.astype(np.float32), 0.0)  # NaN becomes 0
        np.minimum(array, 1.0, out=array)
        np.multiply(array, 255.0, out=array)
        np.rint(array, out=array)
    elif array.dtype != np.uint8:
        array = np.clip(array, 0, 255)
    pixels: NDArray[np.uint8] = array.astype(np.uint8, copy=False)
    return pixels


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels of shape (H, W, C) as PNG."""
    height, width, channels = pixels.shape
    rows = np.empty((height, 1 + width * channels), np.uint8)
    rows[:, 0] = 1  # the filter of each row: difference to the pixel on the left
    flat = pixels.reshape(height, width * channels)
    rows[:, 1 : 1 + channels] = flat[:, :channels]
    np.subtract(flat[:, channels:], flat[:, :-channels], out=rows[:, 1 + channels :])
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    # zlib's strategy for PNG: twice as fast for photographs as a search for longer matches.
    compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
    data = compressor.compress(rows.data) + compressor.flush()
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
