"""Checks of a tensor-parallel plan at the first batch, by the shapes of activations.

Torch's errors would name matrix shapes that do not occur in the user's model, or there would be
none.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerolab.errors import EngineError
from zerotrial.extensions.tensor_parallel.plan import Layer
from zerotrial.extensions.tensor_parallel.plan_validation import is_transposed, layouts_of

__all__ = ["watch_first_batch"]

logger = logging.getLogger(__name__)


def watch_first_batch(module: nn.Module, layers: Sequence[Layer], size: int) -> None:
    """Check the input of each linear layer and the model's output once.

    The first forward raises an :class:`~zerolab.errors.EngineError` if a layer reads a rank's
    part instead of the full activation, or vice versa, and warns if the model returns a part.
    """
    planned = {layer.module: layer for layer in layers}
    for name, part in module.named_modules():
        layer = planned.get(part)
        linear = type(part).forward is nn.Linear.forward or is_transposed(part)
        if linear and (layer is None or layer.plan.style in {"colwise", "rowwise"}):
            _watch_input(name, part, layer, size)
    outputs: list[tuple[str, weakref.ref[Tensor]]] = []
    handles = [
        layer.module.register_forward_hook(
            lambda _module, _args, out, name=layer.name: outputs.append((name, weakref.ref(out)))
        )
        for layer in layers
        if layer.plan.style == "colwise" and layouts_of(layer)[1] == "split"
    ]

    def look(_module: nn.Module, _args: Any, out: Any) -> None:
        for handle in handles:
            handle.remove()
        for name in [name for name, output in outputs if _holds(out, output())]:
            logger.warning(
                "tensor_parallel: the model returns the output of %s, of which each rank has a "
                "part; to get the full output on every rank set "
                '{"style": "colwise", "output": "replicate"}',
                name,
            )

    if handles:
        handles.append(module.register_forward_hook(look))


def _holds(out: Any, tensor: Tensor | None) -> bool:
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else [out]
    return tensor is not None and any(part is tensor for part in parts)


def _watch_input(name: str, part: nn.Module, layer: Layer | None, size: int) -> None:
    weight: Any = part.weight
    features = int(weight.shape[0 if is_transposed(part) else 1])
    splits = layer is not None and layer.plan.style == "rowwise"
    if splits and layer is not None and layouts_of(layer)[0] != "split":
        features *= size  # the layer takes its part itself

    def look(_module: nn.Module, args: Any) -> None:
        handle.remove()
        got = int(args[0].shape[-1]) if args and isinstance(args[0], Tensor) else features
        if got * size == features:
            raise EngineError(
                f"tensor_parallel.plan: {name} reads {features} features, got {got}, a rank's part "
                "of the output of a colwise layer; make this one rowwise, or let that one return "
                'the full output: {"style": "colwise", "output": "replicate"}'
            )
        if splits and got == features * size:
            raise EngineError(
                f"tensor_parallel.plan: {name} is rowwise and reads a rank's {features} features, "
                f"got all {got}; make the layer before it colwise, or let this one take its part: "
                '{"style": "rowwise", "input": "replicate"}'
            )

    handle = part.register_forward_pre_hook(look)
