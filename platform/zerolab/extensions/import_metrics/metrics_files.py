"""Metrics files of runs without a server."""

import hashlib
from pathlib import Path

import msgspec

from zerolab.client.imports import ImportedRun
from zerolab.contract.media import DIGEST
from zerolab.errors import ConfigError
from zerolab.reports.media_files import MEDIA_DIR
from zerolab.reports.metrics_file import MetricsHeader

__all__ = ["locate", "read"]


def locate(path: Path) -> list[Path]:
    """Return the metrics files below a path."""
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return sorted(path.rglob("metrics.jsonl"))


def read(file: Path, _root: Path) -> ImportedRun:
    """Read a metrics file.

    Raises:
        ConfigError: If it is not a metrics file.
    """
    content = file.read_bytes()
    first, _, records = content.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=MetricsHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"{file}: line 1: must be the header of a metrics file ({error})"
        raise ConfigError("zerolab import", [problem]) from None
    name = str(header.config.get("name") or file.absolute().parent.name)
    run = ImportedRun("metrics", hashlib.sha256(content).hexdigest(), name, header.time)
    run.hparams = header.hparams
    run.header = msgspec.json.decode(first)
    run.records = records
    run.record_points = records.count(b'"kind":"metrics"')
    files = (file.parent / MEDIA_DIR).glob("*")
    run.contents = {
        path.name.partition(".")[0]: path
        for path in files
        if DIGEST.fullmatch(path.name.partition(".")[0])
        and path.name.partition(".")[0].encode() in records
    }
    return run
