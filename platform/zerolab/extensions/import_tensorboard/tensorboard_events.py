"""TensorBoard event files: scalars and hyperparameters."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolab.client.imports import ImportedRun, run_name

__all__ = ["locate", "read"]

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
"""Length and its checksum before a record, checksum after it."""
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
        elif not value.tag.startswith("_hparams_/"):
            run.omitted[plugin or {"histo": "histograms", "image": "images"}.get(kind, kind)] += 1


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
