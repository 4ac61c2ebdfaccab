"""Preparation of a model for tokens that are divided over the ranks of the sequence axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from zerolab.errors import ConfigError
from zerotrial.engine.module.equal_batches import check_batches
from zerotrial.extensions.sequence_parallel.attention import DistributedAttention

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["prepare_model"]


def prepare_model(module: nn.Module, mesh: Mesh) -> Callable[[], None]:
    """Connect a model's attention with the ranks of its sequence axis. **Collective**.

    A model with :class:`~zerotrial.extensions.sequence_parallel.attention.DistributedAttention`
    divides its tokens itself. For a causal model of Hugging Face the engine does both.

    Args:
        module: The model.
        mesh: The mesh.

    Returns:
        Function that undoes the changes.

    Raises:
        ConfigError: If the model's attention cannot be divided.
    """
    axis = mesh.sequence
    attentions = [part for part in module.modules() if isinstance(part, DistributedAttention)]
    if attentions:
        without = [part for part in attentions if part.spg is None]

        def set_group(group: Any) -> None:
            for part in without:
                part.spg = group

        set_group(axis.group)
        return lambda: set_group(None)
    if not hasattr(module, "set_attn_implementation"):
        raise ConfigError(
            "sequence_parallel_size",
            [
                f"must be 1, because {type(module).__name__} has no attention over divided tokens, "
                f"got {axis.size}; call the attention through DistributedAttention of "
                "zerotrial.extensions.sequence_parallel.attention, or pass a causal model of "
                "transformers"
            ],
        )
    from zerotrial.extensions.sequence_parallel.library_models import divide_tokens

    undo = divide_tokens(module, axis)
    # Registered last and called first: the batches must be equal before they are divided.
    check = check_batches(module, axis.group, axis.size, "sequence_parallel_size", prepend=True)

    def undo_all() -> None:
        check.remove()
        undo()

    return undo_all
