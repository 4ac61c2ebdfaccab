"""Experts of a mixture, divided over the tensor axis.

::

    4 experts, 2 ranks, 2 experts per token    rank 0: experts 0, 1    rank 1: experts 2, 3

    token   experts   weights                  rows of a rank
    0       1, 2      a, b                     a x E1(0)               b x E2(0)
    1       2, 3      c, d                     -                       c x E2(1), d x E3(1)

Every rank has all tokens. It computes the rows of its experts, and the outputs are summed over
ranks. Experts see only their own rows, each with one local expert, so that any implementation of
their forward works, and no rank computes rows of another's experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerotrial.extensions.tensor_parallel.plan import Layer
from zerotrial.extensions.tensor_parallel.redistribution import TensorRanks, enter, leave

__all__ = ["experts_problem", "local_experts", "replicated_parts"]

_COUNT = "num_experts"
_CONTRACT = "forward(hidden_states, top_k_index, top_k_weights)"


def experts_problem(module: nn.Module, size: int) -> str | None:
    """Return why the experts of a module cannot be divided; None if they can."""
    count = getattr(module, _COUNT, None)
    parameters = dict(module.named_parameters(recurse=False))
    arguments = inspect.signature(module.forward).parameters
    if not isinstance(count, int) or not parameters or len(arguments) != 3:
        return (
            f"experts must be one module with {_COUNT}, {_CONTRACT} and parameters whose first "
            f"dimension is the expert, got {type(module).__name__}; leave it out of the plan to "
            "replicate it"
        )
    for name, parameter in parameters.items():
        if parameter.dim() < 2 or parameter.shape[0] != count:
            return (
                f"{name} must have {count} experts in its first dimension, got shape "
                f"{tuple(parameter.shape)}"
            )
    if count % size:
        return f"tensor_parallel.size must divide the number of experts, {count}, got {size}"
    return None


def replicated_parts(layers: Sequence[Layer]) -> Iterator[str]:
    """Find modules inside of experts without a plan: their gradients would be partial."""
    planned = {layer.module for layer in layers}
    for layer in layers:
        for name, part in layer.module.named_modules() if layer.plan.style == "experts" else ():
            if part not in planned and next(part.parameters(recurse=False), None) is not None:
                yield (
                    f"{layer.name}.{name}: must have a plan, because a rank computes only the rows "
                    "of its experts; make it 'summed'"
                )


def local_experts(
    layer: Layer,
    inner: Callable[..., Tensor],
    ranks: TensorRanks,
    on_undo: Callable[[Callable[[], None]], None],
) -> Callable[..., Tensor]:
    """Return a forward that computes this rank's experts and sums the outputs of all ranks.

    Args:
        layer: Experts with this rank's parameters.
        inner: Their forward.
        ranks: Tensor-parallel ranks.
        on_undo: Registers an action for restoring the layer.
    """
    module: Any = layer.module
    total = module.num_experts
    count = total // ranks.size
    first = count * ranks.rank
    signature = inspect.signature(inner)
    module.num_experts = count
    on_undo(lambda: setattr(module, _COUNT, total))

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = tuple(signature.bind(*args, **kwargs).arguments.values())
        _check_arguments(layer.name, given)
        hidden, index, weights = given  # (N, H), (N, K), (N, K)
        hidden, weights = enter(hidden, ranks), enter(weights, ranks)
        local = index - first
        tokens, choices = torch.where((local >= 0) & (local < count))
        scale = weights[tokens, choices, None]  # (rows, 1)
        if not len(tokens):
            # A row of zero weight, so that backward has the collectives of the other ranks.
            tokens = choices = index.new_zeros(1)
            local, scale = torch.zeros_like(local), weights[:1, :1] * 0
        rows = inner(hidden[tokens], local[tokens, choices, None], scale)
        return leave(rows.new_zeros(hidden.shape).index_add(0, tokens, rows), ranks)

    return forward


def _check_arguments(name: str, given: tuple[Any, ...]) -> None:
    """Check the shapes: some versions of some models pass a weight for every expert."""
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in given]
    matrices = [shape for shape in shapes if isinstance(shape, tuple) and len(shape) == 2]
    if len(matrices) != 3 or matrices[1] != matrices[2] or matrices[0][0] != matrices[1][0]:
        raise EngineError(
            f"tensor_parallel.plan: {name}: experts must get (tokens, features), (tokens, k) and "
            f"(tokens, k), got {shapes}; leave them out of the plan"
        )
