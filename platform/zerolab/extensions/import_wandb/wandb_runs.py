"""Offline runs of Weights & Biases: files ``run-ID.wandb``.

The file is a log of LevelDB: blocks of 32 KiB with pieces of records, each a message of Protocol
Buffers. Only the few fields that are imported are decoded here, by their numbers in
``wandb_internal.proto``, so that wandb need not be installed.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerolab.client.imports import ImportedRun
from zerolab.errors import ConfigError

__all__ = ["locate", "read"]

_MAGIC = b":W&B"
_FILE_HEADER_BYTES = 7
_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")
"""Checksum, length and kind of a piece of a record."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_OMITTED = {7: "system statistics", 8: "artifacts", 4: "lines of output", 13: "lines of output"}
"""Fields of a record that are not imported."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_HISTORY, _CONFIG, _RUN = 2, 5, 17


def locate(path: Path) -> list[Path]:
    """Return the files of runs below a path."""
    files = [path] if path.is_file() else path.rglob("*.wandb")
    return sorted(file for file in files if file.suffix == ".wandb")


def read(file: Path, _root: Path) -> ImportedRun:
    """Read a run.

    Raises:
        ConfigError: If it is not a file of wandb.
    """
    content = file.read_bytes()
    if not content.startswith(_MAGIC):
        raise ConfigError("zerolab import", [f"{file}: must be a file of wandb"])
    run_id = file.stem.removeprefix("run-")
    run = ImportedRun("wandb", run_id, run_id)
    files = file.parent / "files"
    for record in _records(content, run):
        for number, value in _fields(record):
            if number == _RUN:
                _add_run(run, value)
            elif number == _CONFIG:
                _add_config(run, value)
            elif number == _HISTORY:
                _add_history(run, value, files)
            elif number in _OMITTED:
                run.omitted[_OMITTED[number]] += 1
    run.hparams.pop("_wandb", None)
    return run


def _records(content: bytes, run: ImportedRun) -> Iterator[bytes]:
    """Yield the records of the log; its writer may have died while it wrote the last one."""
    position, pieces = _FILE_HEADER_BYTES, list[bytes]()
    while position + _PIECE.size <= len(content):
        rest_of_block = _BLOCK - position % _BLOCK
        if rest_of_block < _PIECE.size:
            position += rest_of_block
            continue
        _, length, kind = _PIECE.unpack_from(content, position)
        start = position + _PIECE.size
        if kind not in {_FULL, _FIRST, _MIDDLE, _LAST} or start + length > len(content):
            run.omitted["incomplete records at the end of a file"] += 1
            return
        pieces.append(content[start : start + length])
        position = start + length
        if kind in {_FULL, _LAST}:
            yield b"".join(pieces)
            pieces = []


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message: bytes, or an integer."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire_type)
        if size is None:
            size, position = _varint(message, position)
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


def _item(message: bytes) -> tuple[str, Any]:
    """Return the dotted name and the value of an item of a configuration or a history."""
    name, nested, value = "", list[str](), b"null"
    for number, content in _fields(message):
        if number == 1:
            name = content.decode()
        elif number == 2:
            nested.append(content.decode())
        elif number == 16:
            value = content
    return ".".join(nested) or name, json.loads(value)


def _add_run(run: ImportedRun, message: bytes) -> None:
    for number, value in _fields(message):
        if number == 4:
            _add_config(run, value)
        elif number == 8 and value:
            run.name = value.decode()
        elif number == 9 and value:
            run.description = value.decode()
        elif number in {3, 10} and value and (label := value.decode()) not in run.labels:
            run.labels.append(label)  # project and tags
        elif number == 17:
            fields = dict(_fields(value))
            run.created_at = fields.get(1, 0) + fields.get(2, 0) / 1e9


def _add_config(run: ImportedRun, message: bytes) -> None:
    for number, value in _fields(message):
        name, content = _item(value)
        if number == 1:
            run.hparams[name] = content
        else:
            run.hparams.pop(name, None)


class _Position(NamedTuple):
    step: int
    time: float


def _add_history(run: ImportedRun, message: bytes, files: Path) -> None:
    values: dict[str, Any] = {}
    step = 0
    for number, value in _fields(message):
        if number == 1:
            name, content = _item(value)
            values[name] = content
        elif number == 2:
            step = dict(_fields(value)).get(1, 0)
    at = _Position(int(values.get("_step", step)), float(values.get("_timestamp", 0.0)))
    media = [name.removesuffix("._type") for name in values if name.endswith("._type")]
    for name in media:  # flattened: `picture._type`, `picture.path`, ...
        start = f"{name}."
        fields = {
            key.removeprefix(start): item for key, item in values.items() if key.startswith(start)
        }
        _add_media(run, name, fields, at, files)
    for name, value in values.items():
        if not name.startswith(("_", *(f"{each}." for each in media))):
            _add_value(run, name, value, at, files)


def _add_media(
    run: ImportedRun, name: str, fields: dict[str, Any], at: _Position, files: Path
) -> None:
    """Add the media of a logged object; objects of other types are counted as left out."""
    from zerolab.extensions.media.encoders import ENCODERS

    kind = str(fields.get("_type"))
    try:
        if kind == "histogram":
            items = ENCODERS["histogram"]((fields["values"], fields["bins"]))
        elif kind == "table-file":
            table = json.loads(_file(files, fields["path"]).read_text(encoding="utf-8"))
            items = ENCODERS["table"](table["data"], columns=table["columns"])
        elif kind == "images/separated":
            captions = fields.get("captions") or [None] * len(fields["filenames"])
            pairs = zip(fields["filenames"], captions, strict=False)
            items = [
                item
                for path, caption in pairs
                for item in ENCODERS["image"](_file(files, path), caption=caption)
            ]
        else:
            path = _file(files, fields["path"])
            encoder = {"image-file": "image", "audio-file": "audio"}.get(kind, "file")
            items = ENCODERS[encoder](path)
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        run.omitted[f"values of type {kind}"] += 1
        return
    run.add_medium(name, at.step, items, at.time)


def _file(files: Path, path: str) -> Path:
    """Return a file of a run.

    Raises:
        ValueError: If it is not below the directory of the run.
    """
    found = (files / path).resolve()
    if not found.is_relative_to(files.resolve()):
        raise ValueError(path)
    return found


def _add_value(run: ImportedRun, name: str, value: Any, at: _Position, files: Path) -> None:
    if isinstance(value, dict) and "_type" in value:
        _add_media(run, name, value, at, files)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            _add_value(run, f"{name}.{key}", item, at, files)
        return
    if isinstance(value, str):
        value = _NOT_FINITE.get(value, value)
    if isinstance(value, int | float):
        run.add(name, at.step, float(value), at.time)
    else:
        run.omitted[f"values of type {type(value).__name__}"] += 1
