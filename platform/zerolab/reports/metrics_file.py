"""Metrics file of a run without a server: one JSON object a line.

The first line is a header: ``kind`` (``header``), ``format`` (1), the experiment's ``config``, this
trial's ``hparams`` and ``trial_seed``, ``time``. Every other line is one record of
:mod:`zerolab.contract.messages`. Numbers that are not finite are the strings ``NaN``, ``Infinity``
and ``-Infinity``. A run that continues in the same directory appends to the same file. If it
reports a step again, the later line counts.
"""

import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from zerolab.contract.messages import MetricsRecord, Record, wire_number
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import RunSpec
from zerolab.reports.spool import AppendFile

__all__ = ["FORMAT", "MetricsFile", "MetricsHeader"]

FORMAT = 1
_CHUNK_BYTES = 64 * 1024


class MetricsHeader(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """First line of a metrics file."""

    format: int
    config: dict[str, Any]
    hparams: dict[str, Any]
    trial_seed: int
    time: float


class MetricsFile:
    """Writer of a metrics file.

    Args:
        path: Created with a header if missing; else continued after its last complete line.
        spec: Content of the header.
    """

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _size_of_whole_lines(path)
        self._file = AppendFile(path, size)
        if not size:
            config = mask_secrets(spec.config)
            header = MetricsHeader(FORMAT, config, spec.hparams, spec.trial_seed, time.time())
            self.append(self._encoder.encode(header))

    def encode(self, record: Record) -> bytes:
        """Encode a record as JSON."""
        if isinstance(record, MetricsRecord) and not _all_finite(record.values):
            values = {
                name: wire_number(value) if isinstance(value, float) else value
                for name, value in record.values.items()
            }
            record = MetricsRecord(record.group, record.steps, values, record.time)
        return self._encoder.encode(record)

    def append(self, payload: bytes) -> None:
        """Write one line.

        Raises:
            OSError: If the disk is full.
        """
        self._file.append(payload + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _all_finite(values: dict[str, float | str]) -> bool:
    try:
        # One sum instead of a check of each; an overflow only costs the slow path.
        return math.isfinite(sum(values.values()))  # type: ignore[arg-type]
    except TypeError:  # a text
        return False


def _size_of_whole_lines(path: Path) -> int:
    """Return the size of a file's complete lines, in bytes."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - _CHUNK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                end = start
    except FileNotFoundError:
        pass
    return 0
