"""Import and export of a million points: ``python -m benchmarks.metrics.import_export``.

A million scalars in a TensorBoard event file are imported into a server, and exported to Parquet.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event

from benchmarks.metrics.reporting import server
from zerolab.client.imports import SOURCES
from zeroserver.extensions.metrics_export.files import write_parquet

IMPORT_GOAL_S = 60.0
EXPORT_GOAL_S = 5.0
NAMES = 10


def write_events(path: Path, points: int) -> None:
    """Write an event file without checksums, which the import does not read."""
    with path.open("wb") as file:
        for number in range(points):
            step, name = divmod(number, NAMES)
            event = Event(step=step, wall_time=1.7e9 + number / 1000)
            event.summary.value.add(tag=f"train/metric-{name}", simple_value=1 / (step + 1))
            record = event.SerializeToString()
            file.write(len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4))


def main() -> int:
    """Measure, and compare with the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1_000_000)
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as client:
        logs = Path(folder) / "logs"
        logs.mkdir()
        write_events(logs / "events.out.tfevents.1.bench", points)
        began = time.perf_counter()
        (location,) = SOURCES["tensorboard"].locate(logs)
        run = SOURCES["tensorboard"].read(location, logs)
        read = time.perf_counter() - began
        content = run.content()
        experiment = client.import_metrics(content)
        imported = time.perf_counter() - began
        print(f"import {points:,} points: {imported:.1f} s, of which reading {read:.1f} s")
        print(f"request: {len(content) / 1e6:.1f} MB")
        path = Path(folder) / "metrics.parquet"
        began = time.perf_counter()
        assert write_parquet(client, experiment.id, path) == points
        exported = time.perf_counter() - began
        print(f"export to Parquet: {exported:.2f} s, {path.stat().st_size / 1e6:.1f} MB")
    return int(imported > IMPORT_GOAL_S or exported > EXPORT_GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
