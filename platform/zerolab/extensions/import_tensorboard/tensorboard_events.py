"""TensorBoard event files: scalars, hyperparameters and media."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolab.client.imports import ImportedRun, run_name
from zerolab.reports.media_files import MediaItem

__all__ = ["locate", "read"]

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
"""Length and its checksum before a record, checksum after it."""
_IMAGES = {b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif"}
"""Suffixes by the first bytes of a file; PNG otherwise."""
_MAX_BINS = 512
_HPARAMS = "_hparams_/session_start_info"


def locate(path: Path) -> list[Path]:
    """Return the directories below a path that contain event files."""
    files = [path] if path.is_file() else path.rglob("*tfevents*")
    return sorted({file.parent for file in files if "tfevents" in file.name and file.is_file()})


def read(directory: Path, root: Path) -> ImportedRun:
    """Read all event files of a directory, in the order of their names."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    name = run_name(directory, root if root.is_dir() else directory)
    run = ImportedRun("tensorboard", str(directory.resolve()), name)
    for file in sorted(path for path in directory.iterdir() if "tfevents" in path.name):
        for record in _records(file, run):
            try:
                event = Event.FromString(record)
            except DecodeError:
                run.omitted["damaged records"] += 1
                continue
            if event.HasField("summary"):
                _add_summary(run, event)
            elif event.HasField("graph_def"):
                run.omitted["graphs"] += 1
    return run


def _records(file: Path, run: ImportedRun) -> Iterator[memoryview]:
    """Yield the records of a file; its writer may have died while it wrote the last one."""
    content = memoryview(file.read_bytes())
    position, size = 0, len(content)
    while position < size:
        start = position + _HEADER_BYTES
        length = _LENGTH.unpack_from(content, position)[0] if start <= size else size
        if start + length + _FOOTER_BYTES > size:
            run.omitted["incomplete records at the end of a file"] += 1
            return
        yield content[start : start + length]
        position = start + length + _FOOTER_BYTES


def _add_summary(run: ImportedRun, event: Any) -> None:
    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            run.add(value.tag, event.step, value.simple_value, event.wall_time)
            continue
        plugin = value.metadata.plugin_data.plugin_name
        number = _scalar(value.tensor) if kind == "tensor" and plugin in {"scalars", ""} else None
        if number is not None:
            run.add(value.tag, event.step, number, event.wall_time)
        elif value.tag == _HPARAMS:
            _add_hparams(run, value.metadata.plugin_data.content)
        elif value.tag.startswith("_hparams_/"):
            continue
        elif items := _items(kind, plugin, value):
            name = value.tag.removesuffix("/text_summary")
            run.add_medium(name, event.step, items, event.wall_time)
        else:
            run.omitted[plugin or {"histo": "histograms"}.get(kind, kind)] += 1


def _items(kind: str, plugin: str, value: Any) -> list[MediaItem]:
    """Return the media of a value; none of a kind that is not imported."""
    if kind == "image":
        return [_image(value.image.encoded_image_string)]
    if kind == "audio":
        metadata: dict[str, object] = {"sample_rate": int(value.audio.sample_rate)}
        return [MediaItem("audio", value.audio.encoded_audio_string, ".wav", metadata)]
    if kind == "histo":
        return _histogram(value.histo)
    if kind == "tensor" and plugin == "images":  # the first two strings are the size
        return [_image(content) for content in value.tensor.string_val[2:]]
    if kind == "tensor" and plugin == "text":
        text = "\n\n".join(part.decode("utf-8", "replace") for part in value.tensor.string_val)
        return [MediaItem("text", text.encode(), ".txt", {"characters": len(text)})]
    return []


def _image(content: bytes) -> MediaItem:
    suffix = next((end for magic, end in _IMAGES.items() if content.startswith(magic)), ".png")
    return MediaItem("image", content, suffix)


def _histogram(histogram: Any) -> list[MediaItem]:
    """Return a histogram without the empty bins at its ends."""
    counts, limits = list(histogram.bucket), list(histogram.bucket_limit)
    used = [index for index, count in enumerate(counts) if count]
    if not used or used[-1] - used[0] >= _MAX_BINS:
        return []
    first, last = used[0], used[-1]
    low = max(histogram.min, limits[first - 1]) if first else histogram.min
    edges = [low, *limits[first:last], min(histogram.max, limits[last])]
    metadata: dict[str, object] = {
        "counts": counts[first : last + 1],
        "edges": [float(f"{edge:.9g}") for edge in edges],
        "count": int(histogram.num),
        "mean": histogram.sum / histogram.num if histogram.num else 0.0,
    }
    return [MediaItem("histogram", None, "", metadata)]


def _scalar(tensor: Any) -> float | None:
    """Return the number of a tensor without dimensions; None for other tensors."""
    from tensorboard.util.tensor_util import make_ndarray

    if any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    try:
        return float(make_ndarray(tensor).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):  # a text
        return None


def _add_hparams(run: ImportedRun, content: bytes) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    info = HParamsPluginData.FromString(content).session_start_info
    for name, value in info.hparams.items():
        kind = value.WhichOneof("kind")
        run.hparams[name] = None if kind in {None, "null_value"} else getattr(value, kind)
    if info.start_time_secs:
        run.created_at = info.start_time_secs
