"""Tensors of a checkpoint: ranges of parameters in safetensors files, found again by name.

Every entry of a file is a range of one flattened parameter's elements and one kind of tensor, under
the key ``NAME@START:STOP/KIND``. A reader puts any range together from whatever ranges were
written, so neither the ranks nor the stage that saved matter.

A tensor-parallel rank may have columns of a matrix, which are no range of it: its entries are
ranges of its flattened part, under ``NAME@START:STOP~OUTERxLENGTHxINNER,BEGIN:END/KIND``. Seen as
(outer, length, inner), the part is ``[:, begin:end, :]`` of the whole parameter.

Shapes: a range has ``(stop - start,)``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerotrial.engine.checkpoint.files import CheckpointError, FileRecord, write_file
from zerotrial.engine.module.compilation import strip_compiled
from zerotrial.engine.protocols import Piece
from zerotrial.engine.tensor.shard_spec import Span

__all__ = ["ShardReader", "key_of", "ranges_of", "read_tensors", "write_tensors"]

_KEY = re.compile(
    r"^(?P<name>.*)@(?P<start>\d+):(?P<stop>\d+)"
    r"(~(?P<span>\d+x\d+x\d+,\d+:\d+))?/(?P<kind>.*)$",
    re.DOTALL,
)
_FILE_BYTES = 128 * 2**20
"""Bytes gathered in memory before a file is written; bounds what a save needs beside the state."""

_CHUNK = 2**20
"""Elements that are put in place at a time where parts are of different sizes."""


def key_of(name: str, start: int, stop: int, kind: str, span: Span | None = None) -> str:
    """Name an entry; with a span, of a range of that part."""
    part = ""
    if span is not None:
        part = f"~{span.outer}x{span.length}x{span.inner},{span.begin}:{span.end}"
    return f"{name}@{start}:{stop}{part}/{kind}"


def ranges_of(
    pieces: Iterable[Piece], spans: Callable[[str], Span | None] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Copy pieces to host memory, as entries of shard files.

    Args:
        pieces: Of a stage.
        spans: Says which part of a parameter this rank has.
    """
    for piece in pieces:
        start, span = _placed(piece.start, spans(piece.name))
        stop = start + piece.stop - piece.start
        for kind, tensor in piece.tensors.items():
            if stop > start:
                copy = tensor.detach().to("cpu", copy=True)
                yield key_of(piece.name, start, stop, kind, span), copy


def _placed(start: int, span: Span | None) -> tuple[int, Span | None]:
    """Where a range begins: in the whole parameter, if it is a range of that, else in the part."""
    if span is not None and span.in_one_piece:
        return start + span.start, None
    return start, span


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
            loaded = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            msg = f"{path}: missing or damaged ({error})"
            raise CheckpointError(msg) from error
        found |= {strip_compiled(name): value for name, value in loaded.items()}
    return found


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    file: Any
    key: str
    span: Span | None


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
                span = _span_of(found["span"])
                entry = _Range(int(found["start"]), int(found["stop"]), file, key, span)
                name = strip_compiled(found["name"])
                self._ranges.setdefault((name, found["kind"]), []).append(entry)
                self._kinds.setdefault(name, set()).add(found["kind"])
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

    def missing(
        self, name: str, kind: str, start: int, stop: int, span: Span | None = None
    ) -> tuple[int, int] | None:
        """Return the first gap in a range, or None when every element is there.

        Args:
            name: Of the parameter.
            kind: ``master`` or an optimizer state.
            start: First element.
            stop: One after the last.
            span: The part of the parameter that they are counted in; None: the whole.
        """
        count = stop - start
        start, span = _placed(start, span)
        stop = start + count
        entries = self._ranges.get((name, kind), [])
        at = start
        for entry in entries:
            if entry.span != span:
                continue
            if entry.start > at or at >= stop:
                break
            at = max(at, entry.stop)
        if at >= stop:
            return None
        # Parts of other sizes: no element is written twice, so that it is enough to count.
        spans = [s for s in (span, *(entry.span for entry in entries)) if s is not None]
        if spans and sum(e.stop - e.start for e in entries) >= spans[0].whole_numel:
            return None
        return at, stop

    def whole(self, name: str, kind: str, shape: Sequence[int]) -> Tensor:
        """Read one tensor; zeros for a state that a parameter without gradients lacks.

        Args:
            name: Of the parameter.
            kind: ``master`` or an optimizer state.
            shape: Of the parameter.

        Raises:
            CheckpointError: If an element is not there.
        """
        value = torch.zeros(tuple(shape))
        if kind == "master" or kind in self.kinds(name):
            self.read_into(name, kind, 0, value.view(-1))
        return value

    def read_into(
        self, name: str, kind: str, start: int, out: Tensor, span: Span | None = None
    ) -> None:
        """Fill a range.

        Args:
            name: Of the parameter.
            kind: ``master`` or an optimizer state.
            start: First element.
            out: ``(stop - start,)``, any device and type; written in place.
            span: The part of the parameter that the range is in; None: the whole.

        Raises:
            CheckpointError: If an element is not there.
        """
        gap = self.missing(name, kind, start, start + out.numel(), span)
        start, span = _placed(start, span)
        stop = start + out.numel()
        if gap is not None:
            msg = f"{name}: the checkpoint has no {kind} for elements {gap[0]}:{gap[1]}"
            raise CheckpointError(msg)
        for entry in self._ranges.get((name, kind), []):
            if entry.span != span:
                _copy_common(entry, start, out, span)
                continue
            a, b = max(start, entry.start), min(stop, entry.stop)
            if a < b:
                values = entry.file.get_slice(entry.key)[a - entry.start : b - entry.start]
                out[a - start : b - start].copy_(values)


def _span_of(text: str | None) -> Span | None:
    if text is None:
        return None
    return Span(*(int(number) for number in re.split("[x,:]", text)))


def _copy_common(entry: _Range, start: int, out: Tensor, span: Span | None) -> None:
    """Copy the elements that an entry and a range of another part have in common."""
    values = None
    for begin in range(0, out.numel(), _CHUNK):
        end = min(out.numel(), begin + _CHUNK)
        places = torch.arange(start + begin, start + end)
        whole = places if span is None else span.to_whole(places)
        found = whole if entry.span is None else entry.span.to_part(whole)
        there = (found >= entry.start) & (found < entry.stop)
        if bool(there.any()):
            values = entry.file.get_tensor(entry.key) if values is None else values
            part = out[begin:end].cpu()
            part[there] = values[found[there] - entry.start].to(part.dtype)
            out[begin:end].copy_(part)
