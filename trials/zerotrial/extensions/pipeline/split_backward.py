"""Second half of a split backward: the gradients of weights.

The first half, torch's, goes from a chunk's outputs to its inputs. It keeps the gradients at the
nodes where weights enter, in groups of weights and of the nodes that lead to them. If a weight
enters at several nodes, torch's groups may overlap: the weight would count twice, or a freed graph
would be traversed again. So the groups are made disjoint first.

References:
    Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["add_weight_gradients", "keep_weight_gradients"]

_Gradients = tuple[Tensor | None, ...]


@dataclass
class _Group:
    """Weights that are computed together and are in no other group."""

    weights: set[Node]
    """Nodes that accumulate the weights' gradients."""

    origins: dict[Node, _Gradients]
    """Nodes where these weights enter, with the gradients there: one per output of the node."""


def add_weight_gradients(param_groups: Iterable[Mapping[str, Any]], *, together: bool) -> None:
    """Add the weight gradients kept by a micro-batch's first half to ``.grad``.

    Args:
        param_groups: Groups from torch's ``stage_backward_input``: ``params``,
            ``intermediates``, and ``grads`` of the intermediates in the same order.
        together: Use a single pass over all weights instead of one per group. Better with
            recomputed activations, which each pass computes again.
    """
    # A group with several origins passes through nodes of other groups, so it goes first and
    # must not free the graph.
    groups = _disjoint(param_groups, together=together)
    for group in sorted(groups, key=lambda group: len(group.origins), reverse=True):
        _add(group)


def keep_weight_gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Run the first half: compute gradients of inputs, and keep data for the second half.

    Replaces torch's ``stage_backward_input`` before 2.13, which fails if an output or an input has
    no gradient.

    Args:
        outputs: Outputs of a chunk, or its loss. They are detached.
        gradients: Gradients of the outputs; None for a loss.
        inputs: Inputs of the chunk.
        weights: Trained weights.

    Returns:
        Gradients of the inputs, and the groups for :func:`add_weight_gradients`.
    """
    from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

    ends = [index for index, output in enumerate(outputs) if output.requires_grad]
    received = [value for value in inputs if value.requires_grad]
    graph = construct_reverse_graph(_nodes([outputs[index] for index in ends]))
    groups = get_param_groups(_nodes(received), _nodes(weights), graph)
    handles = []
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [None] * len(group["intermediates"])
        handles += [
            node.register_prehook(partial(group["grads"].__setitem__, index))
            for index, node in enumerate(group["intermediates"])
        ]
    input_gradients: dict[int, Tensor | None] = {}
    try:
        if ends and received:
            computed = torch.autograd.grad(
                [outputs[index] for index in ends],
                received,
                [
                    torch.ones_like(outputs[index]) if gradients is None else gradients[index]
                    for index in ends
                ],
                retain_graph=True,
                allow_unused=True,
            )
            input_gradients = dict(zip(map(id, received), computed, strict=True))
    finally:
        for handle in handles:
            handle.remove()
    for output in outputs:
        output.detach_()
    return tuple(input_gradients.get(id(value)) for value in inputs), groups


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    return [get_gradient_edge(tensor).node for tensor in tensors]


def _disjoint(param_groups: Iterable[Mapping[str, Any]], *, together: bool) -> list[_Group]:
    groups: list[_Group] = []
    for param_group in param_groups:
        gradients = param_group.get("grads") or ()  # none if a graph ends before
        arrivals = zip(param_group["intermediates"], gradients, strict=False)
        origins = {node: gradient for node, gradient in arrivals if gradient is not None}
        group = _Group(set(param_group["params"]), origins)
        separate = []
        for other in groups:
            if together or group.weights & other.weights or group.origins.keys() & other.origins:
                group = _Group(group.weights | other.weights, group.origins | other.origins)
            else:
                separate.append(other)
        groups = [*separate, group]
    return groups


def _add(group: _Group) -> None:
    arrived = [
        (GradientEdge(node, index), gradient)
        for node, gradients in group.origins.items()
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    if not arrived:
        return
    several = len(group.origins) > 1
    # The gradient passed from one origin to the next is already part of the latter's.
    handles = [
        node.register_prehook(lambda _, fixed=gradients: fixed)
        for node, gradients in (group.origins.items() if several else ())
    ]
    try:
        computed = torch.autograd.grad(
            [edge for edge, _ in arrived],
            [GradientEdge(node, 0) for node in group.weights],
            [gradient for _, gradient in arrived],
            retain_graph=several,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for node, gradient in zip(group.weights, computed, strict=True):
        if gradient is not None:
            weight = node.variable  # type: ignore[attr-defined]
            # Not in place: two weights of a sum share one gradient tensor.
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
