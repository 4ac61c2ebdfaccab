"""Shard specs of parameters: the part that a tensor-parallel rank has.

::

    shape (4, 6), dim 1, 2 parts            blocks = 3: query, key and value in one matrix

    [ 0 0 0 | 1 1 1 ]                       dim 0:  [ q: part 0 ]
    [ 0 0 0 | 1 1 1 ]                               [ q: part 1 ]
    [ 0 0 0 | 1 1 1 ]                               [ k: part 0 ]   a rank has its part of each
    [ 0 0 0 | 1 1 1 ]                               [ k: part 1 ]
                                                    [ v: part 0 ]
                                                    [ v: part 1 ]

For every dimension and number of blocks there is a view (outer, length, inner) of the full
parameter of which a part has ``[:, begin:end, :]``. Checkpoints need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ShardSpec", "Span", "mark", "unmark"]

_MARK = "tensor_cut"


@dataclass(frozen=True)
class Span:
    """Elements ``[:, begin:end, :]`` of a view (outer, length, inner) of a full parameter."""

    outer: int
    length: int
    inner: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.outer * (self.end - self.begin) * self.inner

    @property
    def full_numel(self) -> int:
        """Number of elements of the full parameter."""
        return self.outer * self.length * self.inner

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in the full parameter."""
        return self.outer == 1 or (self.begin, self.end) == (0, self.length)

    @property
    def start(self) -> int:
        """Index of the first element in the flattened full parameter."""
        return self.begin * self.inner

    def to_full(self, indices: Tensor) -> Tensor:
        """Convert indices of the flattened part to indices of the flattened full parameter."""
        row = (self.end - self.begin) * self.inner
        outer = torch.div(indices, row, rounding_mode="floor")
        return indices + outer * (self.length * self.inner - row) + self.start

    def to_part(self, indices: Tensor) -> Tensor:
        """Convert indices in the other direction; -1 if the part lacks the element."""
        row = (self.end - self.begin) * self.inner
        outer = torch.div(indices, self.length * self.inner, rounding_mode="floor")
        within = indices - outer * (self.length * self.inner) - self.start
        return torch.where((within >= 0) & (within < row), outer * row + within, -1)


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a parameter, and the index of this part."""

    shape: torch.Size
    """Shape of the full parameter."""

    dim: int
    part: int
    parts: int
    blocks: int = 1
    """Number of matrices along ``dim``, each of which is sharded."""

    @property
    def span(self) -> Span:
        """Range of this part's elements."""
        length = self.shape[self.dim] // self.blocks
        width = length // self.parts
        begin = self.part * width
        outer = math.prod(self.shape[: self.dim]) * self.blocks
        return Span(outer, length, math.prod(self.shape[self.dim + 1 :]), begin, begin + width)

    @property
    def part_shape(self) -> torch.Size:
        """Shape of each part."""
        shape = list(self.shape)
        shape[self.dim] //= self.parts
        return torch.Size(shape)

    def take(self, full: Tensor) -> Tensor:
        """Return a copy of this part of a full parameter."""
        span = self.span
        view = full.reshape(span.outer, span.length, span.inner)[:, span.begin : span.end]
        return view.reshape(self.part_shape).clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts of all ranks."""
        span = self.span
        views = [part.reshape(span.outer, -1, span.inner) for part in parts]
        return torch.cat(views, dim=1).reshape(self.shape)


def mark(parameter: nn.Parameter, cut: ShardSpec) -> None:
    """Mark a parameter as sharded."""
    setattr(parameter, _MARK, cut)
    parameter.model_parallel = True  # type: ignore[attr-defined]


def unmark(parameter: nn.Parameter) -> None:
    """Remove the mark of a parameter."""
    for name in (_MARK, "model_parallel"):
        vars(parameter).pop(name, None)
