"""Transfer of activations between chunks: a tensor, or several in a tuple or a list.

The next layer gets the value that it would get without partitioning: a tuple of one stays a tuple.
A schedule allocates buffers for a :class:`Signature` in advance. Without one, for evaluation and to
determine signatures, a :class:`Transfer` moves activations of any shape. Each value follows a
header of fixed size, so that the receiver need not know it::

    parts, form | type, gradient, dimensions, d0, d1, ... of the first | ... of the second | 0 0 0

A failed rank sends a header with no parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.mesh import Axis

__all__ = ["Signature", "Transfer", "parts_of", "rebuild"]

_HEADER = 128

_Form = Literal["tensor", "tuple", "list"]
_FORMS: tuple[_Form, ...] = ("tensor", "tuple", "list")

_TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Supported types of transferred tensors."""


@dataclass(frozen=True)
class Signature:
    """Form, shapes and types of a chunk's output."""

    form: _Form
    parts: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """Shape, type, and whether it has a gradient, of each tensor."""

    @classmethod
    def of(cls, value: Any) -> Signature:
        """Return the signature of a chunk's output.

        Raises:
            EngineError: See :func:`parts_of`.
        """
        parts = parts_of(value)
        described = tuple((tuple(part.shape), part.dtype, part.requires_grad) for part in parts)
        return cls(_form_of(value), described)

    def fits(self, other: Signature) -> bool:
        """Return whether another value fits the same buffers; its gradient may be missing."""
        return (
            self.form == other.form
            and len(self.parts) == len(other.parts)
            and all(
                planned[:2] == actual[:2] and planned[2] >= actual[2]
                for planned, actual in zip(self.parts, other.parts, strict=True)
            )
        )

    def __str__(self) -> str:
        """Return the signature as text for an error."""
        parts = [
            f"{list(shape)} {str(dtype).removeprefix('torch.')}{' with gradient' if flows else ''}"
            for shape, dtype, flows in self.parts
        ]
        return f"a {self.form} of {', '.join(parts)}"


def parts_of(value: Any) -> tuple[Tensor, ...]:
    """Return a chunk's output as the tensors to transfer.

    Raises:
        EngineError: If a part is no tensor, or of an unsupported type.
    """
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    strange = [type(part).__name__ for part in parts if not isinstance(part, Tensor)]
    if strange or not parts:
        msg = "PipelineModule: the output of a stage must be a tensor or a tuple of tensors, got "
        raise EngineError(f"{msg}{', '.join(strange) or 'nothing'}")
    unknown = [str(part.dtype) for part in parts if part.dtype not in _TYPES]
    if unknown:
        names = ", ".join(str(kind) for kind in _TYPES)
        msg = f"PipelineModule: the output of a stage must be of one of the types {names}; got "
        raise EngineError(f"{msg}{', '.join(unknown)}; pass real and imaginary parts on apart")
    return parts


def _form_of(value: Any) -> _Form:
    """Return the form of a value."""
    if isinstance(value, tuple):
        return "tuple"
    return "list" if isinstance(value, list) else "tensor"


def rebuild(parts: tuple[Tensor, ...], form: _Form) -> Any:
    """Rebuild a value from its tensors; the inverse of :func:`parts_of`."""
    if form == "tensor":
        (only,) = parts
        return only
    return parts if form == "tuple" else list(parts)


class Transfer:
    """Sends to and receives from other ranks of the pipeline; :meth:`finish` waits for sends."""

    def __init__(self, pipe: Axis, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device
        self._works: list[Any] = []
        self._in_flight: list[Tensor] = []

    def send(self, value: Any, destination: int) -> None:
        """Start sending.

        Args:
            value: A tensor, or a tuple or list of tensors.
            destination: Rank within the pipeline.

        Raises:
            EngineError: If the value cannot be sent.
        """
        parts = parts_of(value)
        header = [len(parts), _FORMS.index(_form_of(value))]
        for part in parts:
            header += [_TYPES.index(part.dtype), part.requires_grad, part.dim(), *part.shape]
        if len(header) > _HEADER:
            msg = f"PipelineModule: a stage passes on {len(parts)} tensors with too many dimensions"
            raise EngineError(msg)
        # A receive needs the size in advance, so headers have one size.
        header += [0] * (_HEADER - len(header))
        self._put(torch.tensor(header, device=self._device), destination)
        for part in parts:
            self._put(part.detach().contiguous(), destination)

    def send_nothing(self, destination: int) -> None:
        """Send an empty header after a failure.

        Args:
            destination: Rank within the pipeline.
        """
        self._put(torch.zeros(_HEADER, dtype=torch.long, device=self._device), destination)

    def _put(self, tensor: Tensor, destination: int) -> None:
        # Sends do not block: two neighbours that send to each other first would wait for ever. The
        # backend reads the tensor until the send ends, so it must stay alive.
        self._in_flight.append(tensor)
        self._works.append(dist.isend(tensor, group=self._pipe.group, group_dst=destination))

    def receive(self, origin: int) -> Any:
        """Wait for a value; return None if the sender has failed.

        Args:
            origin: Rank within the pipeline.
        """
        header_tensor = torch.zeros(_HEADER, dtype=torch.long, device=self._device)
        dist.recv(header_tensor, group=self._pipe.group, group_src=origin)
        header = header_tensor.tolist()
        (count, form), position, tensors = header[:2], 2, []
        if not count:
            return None
        for _ in range(count):
            kind, flows, dimensions = header[position : position + 3]
            shape = header[position + 3 : position + 3 + dimensions]
            position += 3 + dimensions
            tensor = torch.empty(shape, dtype=_TYPES[kind], device=self._device)
            dist.recv(tensor, group=self._pipe.group, group_src=origin)
            tensors.append(tensor.requires_grad_(bool(flows)))
        return rebuild(tuple(tensors), _FORMS[form])

    def finish(self) -> None:
        """Wait for all sends."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._in_flight.clear()
