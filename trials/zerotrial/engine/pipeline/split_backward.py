"""The second half of a backward that is split: the gradients of weights.

The first half, torch's, goes from what a chunk gives to what it received. On its way it keeps the
gradients at the nodes where weights come in, in groups: of weights, and of the nodes that lead to
them. Where a weight comes in at several nodes, torch's groups may overlap, so that a weight would
count twice, or a graph be passed again that is freed. Here they are made disjoint first.

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
    """Weights that are made together, and that no other group has."""

    weights: set[Node]
    """Which gather their gradients."""

    origins: dict[Node, _Gradients]
    """Where these weights come in, with the gradients that arrive there: one of each output."""


def add_weight_gradients(noted: Iterable[Mapping[str, Any]], *, together: bool) -> None:
    """Add to ``.grad`` of all weights what a micro-batch's first half has kept.

    Args:
        noted: Groups as ``stage_backward_input`` of torch gives them: ``params``, ``intermediates``
            and ``grads`` of the intermediates, in the same order.
        together: In one pass, which goes from weight to weight once more, in place of one for each
            group. Better where activations are computed again: each pass does that anew.
    """
    # From several origins the way leads through what lies between them, which belongs to others:
    # these groups go first, and free nothing.
    groups = _disjoint(noted, together=together)
    for group in sorted(groups, key=lambda group: len(group.origins), reverse=True):
        _add(group)


def keep_weight_gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Run the first half: the gradients of inputs, and what the second half needs.

    In place of ``stage_backward_input`` of torch before 2.13, which fails where an output or an
    input has no gradient.

    Args:
        outputs: Of a chunk, or its loss. They are detached.
        gradients: Of the outputs; None for a loss.
        inputs: What the chunk received.
        weights: That are trained.

    Returns:
        The gradients of the inputs, and the groups for :func:`add_weight_gradients`.
    """
    from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

    ends = [place for place, output in enumerate(outputs) if output.requires_grad]
    received = [value for value in inputs if value.requires_grad]
    graph = construct_reverse_graph(_nodes([outputs[place] for place in ends]))
    groups = get_param_groups(_nodes(received), _nodes(weights), graph)
    handles = []
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [None] * len(group["intermediates"])
        handles += [
            node.register_prehook(partial(group["grads"].__setitem__, place))
            for place, node in enumerate(group["intermediates"])
        ]
    made: dict[int, Tensor | None] = {}
    try:
        if ends and received:
            found = torch.autograd.grad(
                [outputs[place] for place in ends],
                received,
                [
                    torch.ones_like(outputs[place]) if gradients is None else gradients[place]
                    for place in ends
                ],
                retain_graph=True,
                allow_unused=True,
            )
            made = dict(zip(map(id, received), found, strict=True))
    finally:
        for handle in handles:
            handle.remove()
    for output in outputs:
        output.detach_()
    return tuple(made.get(id(value)) for value in inputs), groups


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    return [get_gradient_edge(tensor).node for tensor in tensors]


def _disjoint(noted: Iterable[Mapping[str, Any]], *, together: bool) -> list[_Group]:
    found: list[_Group] = []
    for each in noted:
        gradients = each.get("grads") or ()  # none has arrived where a graph ends before
        kept = zip(each["intermediates"], gradients, strict=False)
        origins = {node: arrived for node, arrived in kept if arrived is not None}
        group = _Group(set(each["params"]), origins)
        apart = []
        for other in found:
            if together or group.weights & other.weights or group.origins.keys() & other.origins:
                group = _Group(group.weights | other.weights, group.origins | other.origins)
            else:
                apart.append(other)
        found = [*apart, group]
    return found


def _add(group: _Group) -> None:
    arrived = [
        (GradientEdge(node, place), gradient)
        for node, gradients in group.origins.items()
        for place, gradient in enumerate(gradients)
        if gradient is not None
    ]
    if not arrived:
        return
    several = len(group.origins) > 1
    # What one origin passes on to the next is in the latter's gradient already.
    handles = [
        node.register_prehook(lambda _, kept=gradients: kept)
        for node, gradients in (group.origins.items() if several else ())
    ]
    try:
        made = torch.autograd.grad(
            [edge for edge, _ in arrived],
            [GradientEdge(node, 0) for node in group.weights],
            [gradient for _, gradient in arrived],
            retain_graph=several,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for node, gradient in zip(group.weights, made, strict=True):
        if gradient is not None:
            weight = node.variable  # type: ignore[attr-defined]
            # Not in place: two weights of a sum have one gradient, which is one tensor.
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
