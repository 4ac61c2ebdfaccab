"""``deepspeed.sequence.layer``: attention over tokens that are divided among ranks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerotrial.extensions.sequence_parallel import attention

__all__ = ["DistributedAttention"]


class DistributedAttention(attention.DistributedAttention):
    """The engine's class with DeepSpeed's defaults.

    Args:
        local_attention: See the base class.
        sequence_process_group: See the base class.
        scatter_idx: See the base class.
        gather_idx: See the base class.
        sp_stream: Has no effect: one stream runs the exchanges.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        del sp_stream
        super().__init__(local_attention, sequence_process_group, scatter_idx, gather_idx)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the context of this rank's tokens; ``batch_dim_idx`` needs no attention here.

        Raises:
            TypeError: If rotary embeddings are given.
        """
        del batch_dim_idx
        if rotary_pos_emb is not None:
            raise TypeError(
                "rotary_pos_emb: must be None; rotate query and key before, or in local_attention"
            )
        return super().forward(query, key, value, *args, **kwargs)
