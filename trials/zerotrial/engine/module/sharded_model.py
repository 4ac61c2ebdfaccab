"""Model whose matrices are sharded over the tensor axis, as checkpoints and engines see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine.module.shard_spec import ShardSpec, Span, unmark

if TYPE_CHECKING:
    from zerotrial.engine.protocols import TensorRanks

__all__ = ["ShardedModel"]


class ShardedModel:
    """Model with sharded matrices.

    Args:
        module: The model.
        cuts: Shard specs by the first name of each sharded parameter.
        ranks: Ranks of the tensor axis; None if nothing is sharded.
        by_tokens: Whether activations between layers are sharded by tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, ShardSpec],
        ranks: TensorRanks | None,
        *,
        by_tokens: bool = False,
    ) -> None:
        self._module = module
        self.cuts = cuts
        self.ranks = ranks
        self.sharing = None if by_tokens else ranks
        """Ranks that have equal activations between layers."""
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def none(cls, module: nn.Module) -> ShardedModel:
        """Return a model without sharding."""
        return cls(module, {}, None)

    def full(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor of a parameter's shape from all ranks. **Collective** if sharded."""
        cut = self.cuts.get(name)
        if cut is None or self.ranks is None:
            return part
        local = part.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(self.ranks.size)]
        dist.all_gather(parts, local, group=self.ranks.group)
        return cut.join(parts)

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return a copy of this rank's part of a tensor of a parameter's shape."""
        cut = self.cuts.get(name)
        return full if cut is None else cut.take(full)

    def shape(self, name: str, part_shape: torch.Size) -> torch.Size:
        """Return the full shape of a parameter of which this rank has shape ``part_shape``."""
        cut = self.cuts.get(name)
        return part_shape if cut is None else cut.shape

    def span(self, name: str) -> Span | None:
        """Return the range of this rank's part of a parameter; None if it is not sharded."""
        cut = self.cuts.get(name)
        return None if cut is None else cut.span

    def on_undo(self, action: Callable[[], None]) -> None:
        """Register an action for :meth:`undo`."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore the full model on every rank. **Collective**."""
        parameters = dict(self._module.named_parameters())
        for name in self.cuts:
            parameter = parameters[name]
            parameter.data = self.full(name, parameter.data)
            parameter.grad = None
            unmark(parameter)
        for action in self._undo:
            action()
        self.cuts, self._undo = {}, []
