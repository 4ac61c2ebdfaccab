"""Activations from rank to rank without a schedule, of any shape: for evaluation and for measuring.

Each value is led by a header of fixed size, so that the other side need not know what comes::

    parts | type, gradient, dimensions, d0, d1, ... of the first | ... of the second | 0 0 0

A rank that has failed sends a header of no parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.mesh import Axis

__all__ = ["Transfer", "parts_of"]

_HEADER = 64
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
            value: A tensor, or a tuple of tensors.
            to: Place among the ranks.

        Raises:
            EngineError: If the value cannot be sent.
        """
        parts = parts_of(value)
        header = [len(parts)]
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

    def receive(self, origin: int) -> tuple[Tensor, ...] | None:
        """Wait for a value; None if there is none, since something has failed.

        Args:
            origin: Place among the ranks.
        """
        box = torch.zeros(_HEADER, dtype=torch.long, device=self._device)
        dist.recv(box, group=self._pipe.group, group_src=origin)
        header = box.tolist()
        count, at, found = header[0], 1, []
        if not count:
            return None
        for _ in range(count):
            kind, flows, dimensions = header[at : at + 3]
            shape = header[at + 3 : at + 3 + dimensions]
            at += 3 + dimensions
            tensor = torch.empty(shape, dtype=_TYPES[kind], device=self._device)
            dist.recv(tensor, group=self._pipe.group, group_src=origin)
            found.append(tensor.requires_grad_(bool(flows)))
        return tuple(found)

    def finish(self) -> None:
        """Wait until all is sent."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept.clear()
