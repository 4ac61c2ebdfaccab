"""Which part of a parameter a tensor-parallel rank has.

::

    shape (4, 6), dim 1, 2 parts            blocks = 3: query, key and value in one matrix

    [ 0 0 0 | 1 1 1 ]                       dim 0:  [ q: part 0 ]
    [ 0 0 0 | 1 1 1 ]                               [ q: part 1 ]
    [ 0 0 0 | 1 1 1 ]                               [ k: part 0 ]   a rank has its part of each
    [ 0 0 0 | 1 1 1 ]                               [ k: part 1 ]
                                                    [ v: part 0 ]
                                                    [ v: part 1 ]

Whatever the dimension and the blocks, there is a view (outer, length, inner) of the whole parameter
of which a part has ``[:, begin:end, :]``. A checkpoint needs to know no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Cut", "Span", "cut_of", "mark"]

_MARK = "tensor_cut"


@dataclass(frozen=True)
class Span:
    """Elements ``[:, begin:end, :]`` of a view (outer, length, inner) of a whole parameter."""

    outer: int
    length: int
    inner: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """How many."""
        return self.outer * (self.end - self.begin) * self.inner

    @property
    def whole_numel(self) -> int:
        """Elements of the whole parameter."""
        return self.outer * self.length * self.inner

    @property
    def in_one_piece(self) -> bool:
        """Whether they are neighbours in the whole parameter."""
        return self.outer == 1 or (self.begin, self.end) == (0, self.length)

    @property
    def start(self) -> int:
        """The first one's place in the flattened whole."""
        return self.begin * self.inner

    def to_whole(self, places: Tensor) -> Tensor:
        """Turn places in the flattened part into places in the flattened whole."""
        row = (self.end - self.begin) * self.inner
        outer = torch.div(places, row, rounding_mode="floor")
        return places + outer * (self.length * self.inner - row) + self.start

    def to_part(self, places: Tensor) -> Tensor:
        """The other way; -1 where the part has not the element."""
        row = (self.end - self.begin) * self.inner
        outer = torch.div(places, self.length * self.inner, rounding_mode="floor")
        within = places - outer * (self.length * self.inner) - self.start
        return torch.where((within >= 0) & (within < row), outer * row + within, -1)


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut, and which part this is."""

    shape: torch.Size
    """Of the whole parameter."""

    dim: int
    part: int
    parts: int
    blocks: int = 1
    """Matrices that lie one after the other along ``dim``, each of which is cut."""

    @property
    def span(self) -> Span:
        """Where this part's elements are."""
        length = self.shape[self.dim] // self.blocks
        width = length // self.parts
        begin = self.part * width
        outer = math.prod(self.shape[: self.dim]) * self.blocks
        return Span(outer, length, math.prod(self.shape[self.dim + 1 :]), begin, begin + width)

    @property
    def part_shape(self) -> torch.Size:
        """Of each part."""
        shape = list(self.shape)
        shape[self.dim] //= self.parts
        return torch.Size(shape)

    def take(self, whole: Tensor) -> Tensor:
        """Copy this part from a whole parameter."""
        span = self.span
        view = whole.reshape(span.outer, span.length, span.inner)[:, span.begin : span.end]
        return view.reshape(self.part_shape).clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together."""
        span = self.span
        views = [part.reshape(span.outer, -1, span.inner) for part in parts]
        return torch.cat(views, dim=1).reshape(self.shape)


def mark(parameter: nn.Parameter, cut: Cut) -> None:
    """Say that a parameter is cut."""
    setattr(parameter, _MARK, cut)
    parameter.model_parallel = True  # type: ignore[attr-defined]


def unmark(parameter: nn.Parameter) -> None:
    """Say that it is whole."""
    for name in (_MARK, "model_parallel"):
        vars(parameter).pop(name, None)


def cut_of(parameter: nn.Parameter) -> Cut | None:
    """How a parameter is cut; None where nobody has said so."""
    return getattr(parameter, _MARK, None)
