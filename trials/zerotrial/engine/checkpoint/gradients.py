"""Checkpoints between two accumulation boundaries: the gradients gathered so far.

::

    gradients-00000-000.safetensors    NAME@START:STOP/gradient       averaged over ranks; rank 0's
                                       NAME@0:NUMEL/share-00000       rank 0's own, of all elements

Averages lie in any ranges, like master weights. Shares are what stages 0 and 1 have: the average is
a factor times their sum over ranks. The same number of ranks takes them up as they are; others sum
them while they read.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.shards import ShardReader, ranges_of
from zerotrial.engine.progress import WindowState
from zerotrial.engine.protocols import Piece
from zerotrial.engine.tensor.shard_spec import Span

__all__ = ["SavedGradients", "gradient_ranges"]


def gradient_ranges(
    pieces: Iterable[Piece], rank: int, spans: Callable[[str], Span | None] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Copy gathered gradients to host memory, as entries of files.

    Args:
        pieces: Of :meth:`zerotrial.engine.protocols.Stage.gradient_pieces`.
        rank: That has them; tensor-parallel ranks of one model are one.
        spans: Says which part of a parameter this rank has.
    """
    for piece in pieces:
        tensors = {_kind(kind, rank): tensor for kind, tensor in piece.tensors.items()}
        yield from ranges_of([replace(piece, tensors=tensors)], spans)


def _kind(kind: str, rank: int) -> str:
    return f"share-{rank:05}" if kind == "share" else kind


class SavedGradients:
    """Gathered gradients of a checkpoint: a ``GradientSource`` of the engine's protocols.

    Args:
        reader: Of the files with gradients.
        saved: The window in which they were gathered, as :meth:`WindowState.to_dict` gave it.
        share_factor: Of the stage that goes on.
        rank: That goes on; None if not as many ranks go on as have saved.
        spans: Says which part of a parameter this rank has.
    """

    def __init__(
        self,
        reader: ShardReader,
        saved: Mapping[str, Any],
        share_factor: float | None,
        rank: int | None,
        spans: Callable[[str], Span | None] = lambda _: None,
    ) -> None:
        self._spans = spans
        state = dict(saved)
        self._factor: float | None = state.pop("share_factor")
        self.state = WindowState(**state)
        self.loss_scale = self.state.loss_scale
        """By which what is read is to be multiplied; to be set before."""

        self._reader = reader
        self._shares = sorted(kind for kind in reader.all_kinds if kind.startswith("share-"))
        same = rank is not None and self._factor == share_factor
        self._own = _kind("share", rank) if rank is not None and same else None
        self.has_shares = bool(self._shares) and same
        self.has_averages = "gradient" in reader.all_kinds or bool(self._shares and not same)

    def missing(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return what the files lack, one line for each parameter of ``shapes``."""
        found = []
        for name, shape in shapes.items():
            for kind in sorted(self._reader.kinds(name)):
                gap = self._reader.missing(name, kind, 0, math.prod(shape))
                if gap is not None:
                    found.append(f"{name}: no {kind} for elements {gap[0]}:{gap[1]}")
        return found

    def read_average(self, name: str, start: int, out: Tensor) -> None:
        """See :class:`~zerotrial.engine.protocols.GradientSource`."""
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
        """See :class:`~zerotrial.engine.protocols.GradientSource`."""
        if self._own is None or self._own not in self._reader.kinds(name):
            return False
        self._reader.read_into(name, self._own, 0, out, self._spans(name))
        self._scale(out)
        return True

    def _scale(self, out: Tensor) -> None:
        if self.loss_scale != self.state.loss_scale:
            out.mul_(self.loss_scale / self.state.loss_scale)
