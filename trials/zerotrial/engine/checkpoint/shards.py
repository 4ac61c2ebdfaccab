"""Tensors of a checkpoint: ranges of parameters in safetensors files, found again by name.

Every entry of a file is a range of one flattened parameter's elements and one kind of tensor, under
the key ``NAME@START:STOP/KIND``. A reader puts any range together from whatever ranges were
written, so neither the ranks nor the stage that saved matter.

Shapes: a range has ``(stop - start,)``.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerotrial.engine.checkpoint.files import CheckpointError, FileRecord, write_file
from zerotrial.engine.seams import Piece

__all__ = ["ShardReader", "key_of", "ranges_of", "read_tensors", "write_tensors"]

_KEY = re.compile(r"^(?P<name>.*)@(?P<start>\d+):(?P<stop>\d+)/(?P<kind>.*)$", re.DOTALL)
_FILE_BYTES = 128 * 2**20
"""Bytes gathered in memory before a file is written; bounds what a save needs beside the state."""


def key_of(name: str, start: int, stop: int, kind: str) -> str:
    """Name an entry."""
    return f"{name}@{start}:{stop}/{kind}"


def ranges_of(pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Copy pieces to host memory, as entries of shard files."""
    for piece in pieces:
        for kind, tensor in piece.tensors.items():
            if piece.stop > piece.start:
                copy = tensor.detach().to("cpu", copy=True)
                yield key_of(piece.name, piece.start, piece.stop, kind), copy


def write_tensors(
    directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, FileRecord]:
    """Write tensors to as many files as keep memory small.

    Args:
        directory: Must exist.
        stem: Files are called ``<stem>-000.safetensors``, ``<stem>-001.safetensors``, ...
        tensors: Key and value; contiguous, on CPU, none sharing memory with another.

    Returns:
        File name to size and hash.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    records: dict[str, FileRecord] = {}
    batch: dict[str, Tensor] = {}
    held = 0

    def flush() -> None:
        name = f"{stem}-{len(records):03}.safetensors"
        records[name] = write_file(directory / name, safetensors.torch.save(batch))
        batch.clear()

    for key, tensor in tensors:
        batch[key] = tensor
        held += tensor.nbytes
        if held >= _FILE_BYTES:
            flush()
            held = 0
    if batch:
        flush()
    return records


def read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Read all tensors of some files.

    Raises:
        CheckpointError: If a file is missing or is no safetensors file.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            found |= safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            msg = f"{path}: missing or damaged ({error})"
            raise CheckpointError(msg) from error
    return found


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    file: Any
    key: str


class ShardReader:
    """Reads any range of any parameter; a context manager that keeps the files open.

    Args:
        paths: Shard files of one checkpoint.

    Raises:
        CheckpointError: If a file is missing or is no safetensors file.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._stack = ExitStack()
        self._ranges: dict[tuple[str, str], list[_Range]] = {}
        self._kinds: dict[str, set[str]] = {}
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                msg = f"{path}: missing or damaged ({error})"
                raise CheckpointError(msg) from error
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                found = _KEY.match(key)
                if found is None:
                    self._stack.close()
                    msg = f"{path}: damaged (entry {key!r} is no NAME@START:STOP/KIND)"
                    raise CheckpointError(msg)
                entry = _Range(int(found["start"]), int(found["stop"]), file, key)
                self._ranges.setdefault((found["name"], found["kind"]), []).append(entry)
                self._kinds.setdefault(found["name"], set()).add(found["kind"])
        for ranges in self._ranges.values():
            ranges.sort(key=lambda entry: entry.start)

    def __enter__(self) -> Self:
        """Keep the files open until the context ends."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._stack.close()

    @property
    def all_kinds(self) -> set[str]:
        """Kinds of tensors that are there for any parameter."""
        return {kind for _, kind in self._ranges}

    def kinds(self, name: str) -> set[str]:
        """Return the kinds of tensors that are there for a parameter."""
        return self._kinds.get(name, set())

    def missing(self, name: str, kind: str, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first gap in a range, or None when every element is there."""
        at = start
        for entry in self._ranges.get((name, kind), []):
            if entry.start > at or at >= stop:
                break
            at = max(at, entry.stop)
        return (at, stop) if at < stop else None

    def read_into(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Fill a range.

        Args:
            name: Of the parameter.
            kind: ``master`` or an optimizer state.
            start: First element.
            out: ``(stop - start,)``, any device and type; written in place.

        Raises:
            CheckpointError: If an element is not there.
        """
        stop = start + out.numel()
        if (gap := self.missing(name, kind, start, stop)) is not None:
            msg = f"{name}: the checkpoint has no {kind} for elements {gap[0]}:{gap[1]}"
            raise CheckpointError(msg)
        for entry in self._ranges.get((name, kind), []):
            a, b = max(start, entry.start), min(stop, entry.stop)
            if a < b:
                values = entry.file.get_slice(entry.key)[a - entry.start : b - entry.start]
                out[a - start : b - start].copy_(values)
