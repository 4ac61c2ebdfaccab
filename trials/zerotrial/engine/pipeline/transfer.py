"""What passes from one chunk to the next: a tensor, or several in a tuple or a list.

The next layer gets what it would get without a cut: a tuple of one stays a tuple. A schedule makes
room for a :class:`Signature` before. Without one, for evaluation and to find signatures out, a
:class:`Transfer` takes activations of any shape from rank to rank. Each value is led by a header of
fixed size, so that the other side need not know what comes::

    parts, form | type, gradient, dimensions, d0, d1, ... of the first | ... of the second | 0 0 0

A rank that has failed sends a header of no parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.mesh import Axis

__all__ = ["Signature", "Transfer", "parts_of", "put_together"]

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
"""Of tensors that travel."""


@dataclass(frozen=True)
class Signature:
    """What a chunk gives, but for the values."""

    form: _Form
    parts: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """Shape, type and whether it has a gradient, of each tensor."""

    @classmethod
    def of(cls, value: Any) -> Signature:
        """Look at what a chunk has given.

        Raises:
            EngineError: As :func:`parts_of`.
        """
        parts = parts_of(value)
        found = tuple((tuple(part.shape), part.dtype, part.requires_grad) for part in parts)
        return cls(_form_of(value), found)

    def holds(self, other: Signature) -> bool:
        """Whether another can travel in the place of this one; its gradient may be missing."""
        return (
            self.form == other.form
            and len(self.parts) == len(other.parts)
            and all(
                ours[:2] == theirs[:2] and ours[2] >= theirs[2]
                for ours, theirs in zip(self.parts, other.parts, strict=True)
            )
        )

    def __str__(self) -> str:
        """Say it in a message."""
        parts = [
            f"{list(shape)} {str(dtype).removeprefix('torch.')}{' with gradient' if flows else ''}"
            for shape, dtype, flows in self.parts
        ]
        return f"a {self.form} of {', '.join(parts)}"


def parts_of(value: Any) -> tuple[Tensor, ...]:
    """Return what a chunk gives, as the tensors that travel.

    Raises:
        EngineError: If anything is no tensor, or of a type that does not travel.
    """
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    strange = [type(part).__name__ for part in parts if not isinstance(part, Tensor)]
    if strange or not parts:
        msg = "PipelineModule: what a stage passes on must be a tensor or a tuple of tensors, got "
        raise EngineError(f"{msg}{', '.join(strange) or 'nothing'}")
    unknown = [str(part.dtype) for part in parts if part.dtype not in _TYPES]
    if unknown:
        known = ", ".join(str(kind) for kind in _TYPES)
        msg = f"PipelineModule: what a stage passes on must be of one of the types {known}; got "
        raise EngineError(f"{msg}{', '.join(unknown)}; pass real and imaginary parts on apart")
    return parts


def _form_of(value: Any) -> _Form:
    """Say in what the tensors of a value are."""
    if isinstance(value, tuple):
        return "tuple"
    return "list" if isinstance(value, list) else "tensor"


def put_together(parts: tuple[Tensor, ...], form: _Form) -> Any:
    """Make of tensors that have travelled what was given: the inverse of :func:`parts_of`."""
    if form == "tensor":
        (only,) = parts
        return only
    return parts if form == "tuple" else list(parts)


class Transfer:
    """Sends to and receives from ranks of the pipeline; sends wait until :meth:`finish`.

    Args:
        pipe: The ranks.
        device: Of this one.
    """

    def __init__(self, pipe: Axis, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device
        self._works: list[Any] = []
        self._kept: list[Tensor] = []

    def send(self, value: Any, to: int) -> None:
        """Start sending.

        Args:
            value: A tensor, or a tuple or list of tensors.
            to: Place among the ranks.

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
        header += [0] * (_HEADER - len(header))
        self._put(torch.tensor(header, device=self._device), to)
        for part in parts:
            self._put(part.detach().contiguous(), to)

    def send_nothing(self, to: int) -> None:
        """Tell that there is no value, since something has failed.

        Args:
            to: Place among the ranks.
        """
        self._put(torch.zeros(_HEADER, dtype=torch.long, device=self._device), to)

    def _put(self, tensor: Tensor, to: int) -> None:
        self._kept.append(tensor)
        self._works.append(dist.isend(tensor, group=self._pipe.group, group_dst=to))

    def receive(self, origin: int) -> Any:
        """Wait for a value; None if there is none, since something has failed.

        Args:
            origin: Place among the ranks.
        """
        box = torch.zeros(_HEADER, dtype=torch.long, device=self._device)
        dist.recv(box, group=self._pipe.group, group_src=origin)
        header = box.tolist()
        (count, form), at, found = header[:2], 2, []
        if not count:
            return None
        for _ in range(count):
            kind, flows, dimensions = header[at : at + 3]
            shape = header[at + 3 : at + 3 + dimensions]
            at += 3 + dimensions
            tensor = torch.empty(shape, dtype=_TYPES[kind], device=self._device)
            dist.recv(tensor, group=self._pipe.group, group_src=origin)
            found.append(tensor.requires_grad_(bool(flows)))
        return put_together(tuple(found), _FORMS[form])

    def finish(self) -> None:
        """Wait until all is sent."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept.clear()
