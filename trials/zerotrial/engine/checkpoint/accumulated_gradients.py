"""Accumulated gradients of checkpoints between two accumulation boundaries.

::

    gradients-00000-000.safetensors    NAME@START:STOP/gradient       averaged over ranks; rank 0's
                                       NAME@0:NUMEL/share-00000       rank 0's own, of all elements

Averages are stored in arbitrary ranges, like master weights. Shares exist at stages 0 and 1: the
average is a factor times their sum over ranks. The same number of ranks restores them unchanged;
other numbers sum them while reading.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.shards import ShardReader, ranges_of
from zerotrial.engine.module.shard_spec import Span
from zerotrial.engine.progress import WindowState
from zerotrial.engine.protocols import Piece

__all__ = ["SavedGradients", "gradient_ranges"]


def gradient_ranges(
    pieces: Iterable[Piece], rank: int, spans: Callable[[str], Span | None] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Copy accumulated gradients to host memory, as entries of files.

    Args:
        pieces: Pieces of :meth:`zerotrial.engine.protocols.Stage.gradient_pieces`.
        rank: Rank of the shares; tensor-parallel ranks of one model count as one.
        spans: Returns the part of a parameter that this rank has.
    """
    for piece in pieces:
        tensors = {_kind(kind, rank): tensor for kind, tensor in piece.tensors.items()}
        yield from ranges_of([replace(piece, tensors=tensors)], spans)


def _kind(kind: str, rank: int) -> str:
    return f"share-{rank:05}" if kind == "share" else kind


class SavedGradients:
    """Accumulated gradients of a checkpoint: a ``GradientSource`` of the engine's protocols.

    Args:
        reader: Reader of the files with gradients.
        saved: Window of the gradients, from :meth:`WindowState.to_dict`.
        local_to_average: Factor from unreduced gradients to averages, of the loading stage.
        rank: Loading rank; None if the number of ranks has changed.
        spans: Returns the part of a parameter that this rank has.
    """

    def __init__(
        self,
        reader: ShardReader,
        saved: Mapping[str, Any],
        local_to_average: float | None,
        rank: int | None,
        spans: Callable[[str], Span | None] = lambda _: None,
    ) -> None:
        self._spans = spans
        state = dict(saved)
        self._factor: float | None = state.pop("share_factor")
        self.state = WindowState(**state)
        self.loss_scale = self.state.loss_scale
        """Loss scale for the restored gradients; set it before reading."""

        self._reader = reader
        self._shares = sorted(kind for kind in reader.all_kinds if kind.startswith("share-"))
        same = rank is not None and self._factor == local_to_average
        self._own_kind = _kind("share", rank) if rank is not None and same else None
        self.has_shares = bool(self._shares) and same
        self.has_averages = "gradient" in reader.all_kinds or bool(self._shares and not same)

    def missing(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the missing ranges, one line per parameter of ``shapes``."""
        lines = []
        for name, shape in shapes.items():
            for kind in sorted(self._reader.kinds(name)):
                gap = self._reader.missing(name, kind, 0, math.prod(shape))
                if gap is not None:
                    lines.append(f"{name}: no {kind} for elements {gap[0]}:{gap[1]}")
        return lines

    def read_average(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` from element ``start`` of a parameter, if it has an average."""
        kinds = self._reader.kinds(name)
        if "gradient" in kinds:
            self._reader.read_into(name, "gradient", start, out, self._spans(name))
        shares = [] if self.has_shares else [kind for kind in self._shares if kind in kinds]
        if shares:
            wide = torch.promote_types(out.dtype, torch.float32)
            part = torch.empty(out.numel(), dtype=wide)
            total = torch.zeros_like(part)
            for kind in shares:
                self._reader.read_into(name, kind, start, part, self._spans(name))
                total += part
            assert self._factor is not None
            out += total.mul_(self._factor).to(out.device)
        self._scale(out)

    def read_share(self, name: str, out: Tensor) -> bool:
        """Fill ``out`` with a parameter's share; return False if it has none."""
        if self._own_kind is None or self._own_kind not in self._reader.kinds(name):
            return False
        self._reader.read_into(name, self._own_kind, 0, out, self._spans(name))
        self._scale(out)
        return True

    def _scale(self, out: Tensor) -> None:
        if self.loss_scale != self.state.loss_scale:
            out.mul_(self.loss_scale / self.state.loss_scale)
