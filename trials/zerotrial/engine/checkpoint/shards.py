"""Tensors of a checkpoint: ranges of parameters in safetensors files, located by name.

Every entry of a file is a range of one flattened parameter and one kind of tensor, with the key
``NAME@START:STOP/KIND``. A reader assembles any range from the ranges that were written, so neither
the ranks nor the stage that saved matter.

A tensor-parallel rank may have columns of a matrix, which are no contiguous range. Its entries are
ranges of its flattened part, ``NAME@START:STOP~OUTERxLENGTHxINNER,BEGIN:END/KIND``. With the full
parameter viewed as (outer, length, inner), the part is ``[:, begin:end, :]``.

Shapes: a range has ``(stop - start,)``.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
from zerotrial.engine.module.shard_spec import Span
from zerotrial.engine.protocols import Piece

__all__ = ["ShardReader", "key_of", "ranges_of", "read_tensors", "write_tensors"]

_KEY = re.compile(
    r"^(?P<name>.*)@(?P<start>\d+):(?P<stop>\d+)"
    r"(~(?P<span>\d+x\d+x\d+,\d+:\d+))?/(?P<kind>.*)$",
    re.DOTALL,
)
_FILE_BYTES = 128 * 2**20
"""Bytes collected in memory before a file is written; limits the memory of a save."""

_WRITERS = 2
"""Number of files written at the same time."""

_TYPE_NAMES = {
    getattr(torch, torch_name): name
    for name, torch_name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, torch_name)
}
"""Names of types in safetensors files."""

_CHUNK = 2**20
"""Number of elements copied at a time between parts of different sizes."""


def key_of(name: str, start: int, stop: int, kind: str, span: Span | None = None) -> str:
    """Return the key of an entry; with a span, of a range of that part."""
    part = ""
    if span is not None:
        part = f"~{span.outer}x{span.length}x{span.inner},{span.begin}:{span.end}"
    return f"{name}@{start}:{stop}{part}/{kind}"


def ranges_of(
    pieces: Iterable[Piece], spans: Callable[[str], Span | None] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Copy pieces to host memory, as entries of shard files.

    Args:
        pieces: Pieces of a stage.
        spans: Returns the part of a parameter that this rank has.
    """
    for piece in pieces:
        start, span = _locate(piece.start, spans(piece.name))
        stop = start + piece.stop - piece.start
        for kind, tensor in piece.tensors.items():
            if stop > start:
                copy = tensor.detach().to("cpu", copy=True)
                yield key_of(piece.name, start, stop, kind, span), copy


def _locate(start: int, span: Span | None) -> tuple[int, Span | None]:
    """Return a start in the full parameter if the range is contiguous there, else in the part."""
    if span is not None and span.is_contiguous:
        return start + span.start, None
    return start, span


def write_tensors(
    directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, FileRecord]:
    """Write tensors to several files, to limit memory.

    Two threads write, since hashing one file takes about as long as writing another.

    Args:
        directory: Existing directory.
        stem: Files are named ``<stem>-000.safetensors``, ``<stem>-001.safetensors``, ...
        tensors: Key and value; CPU tensors.

    Returns:
        File name to size and hash.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    files: dict[str, Future[FileRecord]] = {}
    running: set[Future[FileRecord]] = set()
    with ThreadPoolExecutor(_WRITERS) as pool:
        for number, batch in enumerate(_batches(tensors)):
            if len(running) >= _WRITERS:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for file in done:
                    file.result()  # after an error, no further file is written
            name = f"{stem}-{number:03}.safetensors"
            files[name] = pool.submit(_write_safetensors, directory / name, batch)
            running.add(files[name])
    return {name: file.result() for name, file in files.items()}


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors:
        batch[key] = tensor
        size += tensor.nbytes
        if size >= _FILE_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a file as ``safetensors.torch.save_file`` does, without its two copies of all data."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # keeps alignment
    entries: dict[str, dict[str, object]] = {}
    position = 0
    for key, tensor in ordered:
        if tensor.dtype not in _TYPE_NAMES:
            msg = f"{key}: must have a type of safetensors files, got {tensor.dtype}"
            raise CheckpointError(msg)
        end = position + tensor.nbytes
        entries[key] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    contents = (tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered)
    return write_file(
        path,
        struct.pack("<Q", len(header)),
        header,
        *(content.numpy().data for content in contents),
    )


def read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Read all tensors of several files.

    Raises:
        CheckpointError: If a file is missing or is no safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            loaded = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            msg = f"{path}: missing or damaged ({error})"
            raise CheckpointError(msg) from error
        tensors |= {strip_compiled(name): value for name, value in loaded.items()}
    return tensors


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    file: Any
    key: str
    span: Span | None


class ShardReader:
    """Reader of any range of any parameter; a context manager that keeps the files open.

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
                match = _KEY.match(key)
                if match is None:
                    self._stack.close()
                    msg = f"{path}: damaged (entry {key!r} is no NAME@START:STOP/KIND)"
                    raise CheckpointError(msg)
                span = _span_of(match["span"])
                entry = _Range(int(match["start"]), int(match["stop"]), file, key, span)
                name = strip_compiled(match["name"])
                self._ranges.setdefault((name, match["kind"]), []).append(entry)
                self._kinds.setdefault(name, set()).add(match["kind"])
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
        """Kinds of tensors that exist for any parameter."""
        return {kind for _, kind in self._ranges}

    def kinds(self, name: str) -> set[str]:
        """Return the kinds of tensors that exist for a parameter."""
        return self._kinds.get(name, set())

    def missing(
        self, name: str, kind: str, start: int, stop: int, span: Span | None = None
    ) -> tuple[int, int] | None:
        """Return the first gap in a range, or None if it is complete.

        Args:
            name: Name of the parameter.
            kind: ``master`` or an optimizer state.
            start: First element.
            stop: One after the last element.
            span: Part of the parameter to which they refer; None: the full parameter.
        """
        count = stop - start
        start, span = _locate(start, span)
        stop = start + count
        entries = self._ranges.get((name, kind), [])
        position = start
        for entry in entries:
            if entry.span != span:
                continue
            if entry.start > position or position >= stop:
                break
            position = max(position, entry.stop)
        if position >= stop:
            return None
        # Parts of different sizes: no element is written twice, so counting is enough.
        spans = [s for s in (span, *(entry.span for entry in entries)) if s is not None]
        if spans and sum(e.stop - e.start for e in entries) >= spans[0].full_numel:
            return None
        return position, stop

    def read_full(self, name: str, kind: str, shape: Sequence[int]) -> Tensor:
        """Read one tensor; zeros for a state that a parameter without gradients lacks.

        Args:
            name: Name of the parameter.
            kind: ``master`` or an optimizer state.
            shape: Shape of the parameter.

        Raises:
            CheckpointError: If an element is missing.
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
            name: Name of the parameter.
            kind: ``master`` or an optimizer state.
            start: First element.
            out: ``(stop - start,)``, any device and type; written in place.
            span: Part of the parameter that the range is in; None: the full parameter.

        Raises:
            CheckpointError: If an element is missing.
        """
        gap = self.missing(name, kind, start, start + out.numel(), span)
        start, span = _locate(start, span)
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
    """Copy the elements that an entry shares with a range of another part."""
    values = None
    for begin in range(0, out.numel(), _CHUNK):
        end = min(out.numel(), begin + _CHUNK)
        indices = torch.arange(start + begin, start + end)
        full_indices = indices if span is None else span.to_full(indices)
        entry_indices = full_indices if entry.span is None else entry.span.to_part(full_indices)
        is_common = (entry_indices >= entry.start) & (entry_indices < entry.stop)
        if bool(is_common.any()):
            values = entry.file.get_tensor(entry.key) if values is None else values
            part = out[begin:end].cpu()
            part[is_common] = values[entry_indices[is_common] - entry.start].to(part.dtype)
            out[begin:end].copy_(part)
