"""Attention over tokens that are divided among ranks, by two all-to-alls (Ulysses).

P ranks have T / P tokens each, of all H heads. The first all-to-all gives each rank all T tokens of
H / P heads, with which any attention computes; the second one reverses it. Backward runs the same
exchanges in the opposite order. A rank sends 4 x T / P x H x D elements for an attention in
forward, D being the size of a head.

References:
    Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.errors import EngineError

__all__ = ["DistributedAttention", "exchange"]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
        ctx.arguments = group, gather, scatter
        return _all_to_all(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_to_all(gradients[0], *ctx.arguments), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> Tensor:
    """Divide a tensor along one dimension and gather it along another. **Collective**.

    Args:
        x: The same shape on each rank.
        group: The P ranks.
        scatter: Dimension whose p-th part rank p gets; its length is a multiple of P.
        gather: Dimension along which the ranks' parts are concatenated.

    Returns:
        ``x`` with its length along ``scatter`` divided by P, and along ``gather`` times P.
    """
    result: Tensor = _Exchange.apply(x, group, scatter, gather)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), gather)


class DistributedAttention(nn.Module):
    """Runs an attention on all tokens and a part of the heads.

    The class has the name and arguments of DeepSpeed's.

    Args:
        local_attention: Called with query, key and value of all tokens and this rank's heads;
            returns the context in the same layout.
        sequence_process_group: Ranks that divide the tokens; None: set by ``initialize`` if
            ``sequence_parallel_size`` is above 1, otherwise a single rank.
        scatter_idx: Dimension of the heads.
        gather_idx: Dimension of the tokens.

    Example:
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from zerotrial.extensions.sequence_parallel.attention import DistributedAttention
        >>> attention = DistributedAttention(
        ...     scaled_dot_product_attention, scatter_idx=1, gather_idx=2
        ... )
        >>> x = torch.ones(1, 4, 6, 8)  # batch, heads, tokens, head size
        >>> attention(x, x, x).shape
        torch.Size([1, 4, 6, 8])
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the context of this rank's tokens. **Collective** over the group."""
        if self.spg is None or dist.get_world_size(self.spg) == 1:
            return self.local_attn(query, key, value, *args, **kwargs)
        heads = [x.shape[self.scatter_idx] for x in (query, key, value)]
        ranks = dist.get_world_size(self.spg)
        if any(count % ranks for count in heads):
            raise EngineError(
                f"DistributedAttention: {ranks} ranks must divide the numbers of heads of query, "
                f"key and value, got {heads}; use a smaller sequence_parallel_size"
            )
        inner = [
            exchange(x, self.spg, self.scatter_idx, self.gather_idx) for x in (query, key, value)
        ]
        context = self.local_attn(*inner, *args, **kwargs)
        return exchange(context, self.spg, self.gather_idx, self.scatter_idx)
