"""Event files of TensorBoard from exported metrics, one directory for each trial."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

__all__ = ["write_event_files"]


class _Point(msgspec.Struct):
    trial_id: int
    group: str
    name: str
    step: int
    value: float | str | None
    time_s: float


def write_event_files(lines: Iterable[bytes], directory: Path) -> int:
    """Write the points of an export, so that TensorBoard shows ``GROUP/NAME`` of each trial.

    Args:
        lines: Lines of an export with the format ``ndjson``; damaged trials are skipped.
        directory: Directory of the event files of the experiment.

    Returns:
        The number of points.
    """
    decoder = msgspec.json.Decoder(_Point)
    writers: dict[int, EventFileWriter] = {}
    count = 0
    for line in lines:
        try:
            point = decoder.decode(line)
        except msgspec.ValidationError:
            continue
        writer = writers.get(point.trial_id)
        if writer is None:
            writer = EventFileWriter(str(directory / f"trial-{point.trial_id}"))
            writers[point.trial_id] = writer
        value = float("nan" if point.value is None else point.value)
        scalar = Summary.Value(tag=f"{point.group}/{point.name}", simple_value=value)
        summary = Summary(value=[scalar])
        writer.add_event(Event(wall_time=point.time_s, step=point.step, summary=summary))
        count += 1
    for writer in writers.values():
        writer.close()
    return count
