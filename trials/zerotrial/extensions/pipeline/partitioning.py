"""Partitioning of a model into pipeline stages.

::

    weights      5  1  1  1  4  4        of six layers
    boundaries   0     2        5  6     three stages: layers 0 and 1, 2 to 4, 5; the heaviest has 6

A pipeline is as fast as its slowest stage. So the heaviest stage is made as light as possible; of
all partitions that achieve it, the one with the most equal stages is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.extensions.pipeline.layers import Layer, LayerSpec, TiedLayerSpec, name_of, numel_of

__all__ = ["measure", "partition"]

_METHODS = "uniform, parameters, time or type:REGEX"
_TIMED = 3
"""Number of runs of a layer, of which the fastest counts."""


def partition(
    weights_or_layers: Sequence[float] | Sequence[Layer],
    num_stages: int,
    method: str = "parameters",
    sample: Any = None,
) -> list[int]:
    """Divide layers into stages, each of which has at least one.

    Args:
        weights_or_layers: A cost for each layer, in any unit, or the layers.
        num_stages: Number of stages.
        method: ``uniform``: the same number of layers, ``parameters``: by number of parameters
            (alias ``best``), ``time``: by seconds of forward and backward (alias ``profile``),
            or ``type:REGEX``: by the number of layers whose class name contains the expression.
        sample: Input of the first layer, for ``time``.

    Returns:
        Boundaries: stage ``i`` has layers ``result[i]`` to ``result[i + 1] - 1``.

    Raises:
        ConfigError: If there are more stages than layers, or for an unknown method.

    Example:
        >>> from zerotrial.engine.pipeline import partition
        >>> partition([1, 1, 1, 3], num_stages=2)
        [0, 3, 4]
    """
    items = list(weights_or_layers)
    problems = []
    if num_stages < 1:
        problems.append(f"num_stages: must be at least 1, got {num_stages}")
    elif num_stages > len(items):
        problems.append(f"num_stages: must be at most the {len(items)} layers, got {num_stages}")
    if problems:
        raise ConfigError("partition()", problems)
    if method.lower() == "uniform":
        return _uniform(len(items), num_stages)
    if items and isinstance(items[0], int | float):
        return _balanced([float(item) for item in items], num_stages)  # type: ignore[arg-type]
    return _balanced(_weigh(items, method, sample), num_stages)  # type: ignore[arg-type]


def _weigh(layers: Sequence[Layer], method: str, sample: Any) -> list[float]:
    kind = method.lower()
    if kind in {"parameters", "best"}:
        return [float(numel_of(layer)) for layer in layers]
    if kind in {"time", "profile"}:
        if sample is None:
            problem = "partition_method: time needs sample, an input of the first layer"
            raise ConfigError("partition()", [problem])
        return measure(layers, sample)
    if not kind.startswith("type:"):
        problem = f"partition_method: must be {_METHODS}, got {method!r}"
        raise ConfigError("partition()", [problem])
    try:
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
    except re.error as error:
        problem = f"partition_method: is no regular expression after 'type:': {error}"
        raise ConfigError("partition()", [problem]) from error
    weights = [1.0 if pattern.search(name_of(layer)) else 0.0 for layer in layers]
    if not any(weights):
        names = ", ".join(sorted({name_of(layer) for layer in layers}))
        problem = f"partition_method: {method!r} must match a layer's class, of {names}"
        raise ConfigError("partition()", [problem])
    return weights


def measure(layers: Sequence[Layer], sample: Any) -> list[float]:
    """Time the forward and backward of each layer, which is built for it and dropped.

    Args:
        layers: Layers of the pipeline.
        sample: Input of the first layer.

    Returns:
        Seconds of each layer.
    """
    value, times = sample, []
    tied: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            run = _built(layer, tied)
            seconds, value = _timed(run, value)
            times.append(seconds)
    return times


def _built(layer: Layer, tied: dict[str, Any]) -> Callable[[Any], Any]:
    if isinstance(layer, TiedLayerSpec):
        module = tied[layer.key] if layer.key in tied else tied.setdefault(layer.key, layer.build())
        forward = layer.forward_fn
        return module if forward is None else lambda value: forward(module, value)
    built: Callable[[Any], Any] = layer.build() if isinstance(layer, LayerSpec) else layer
    return built


def _timed(run: Callable[[Any], Any], value: Any) -> tuple[float, Any]:
    best = float("inf")
    output: Any = None
    for _ in range(_TIMED):
        inputs = _leaves(value)
        started = time.perf_counter()
        output = run(inputs)
        flow = [part for part in _tensors(output) if part.requires_grad]
        if flow:
            torch.autograd.backward(flow, [torch.ones_like(part) for part in flow])
        best = min(best, time.perf_counter() - started)
    if isinstance(run, nn.Module):
        run.zero_grad()
    return best, _leaves(output)


def _leaves(value: Any) -> Any:
    """Detach tensors from their graph; tensors that can have a gradient require one."""
    if isinstance(value, tuple):
        return tuple(_leaves(part) for part in value)
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return value


def _tensors(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


def _uniform(items: int, stages: int) -> list[int]:
    """Return boundaries of equal stages; the first ones get the remaining layers."""
    size, remainder = divmod(items, stages)
    return [stage * size + min(stage, remainder) for stage in range(stages + 1)]


def _balanced(weights: list[float], stages: int) -> list[int]:
    """Minimize the heaviest stage, then the sum of squares, by dynamic programming."""
    ends = torch.tensor([0.0, *weights], dtype=torch.float64, device="cpu").cumsum(0)
    limit = _lightest(ends, stages)
    items = len(weights)
    infinite = float("inf")
    cost = ends.new_full((stages + 1, items + 1), infinite)
    origin = ends.new_zeros((stages + 1, items + 1), dtype=torch.long)
    cost[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, items + 1):
            weight = ends[end] - ends[:end]
            total = cost[stage - 1, :end] + weight.square()
            total[weight > limit] = infinite
            best = int(total.argmin())
            cost[stage, end], origin[stage, end] = total[best], best
    boundaries = [items]
    for stage in range(stages, 0, -1):
        boundaries.append(int(origin[stage, boundaries[-1]]))
    return boundaries[::-1]


def _lightest(ends: Tensor, stages: int) -> float:
    """Return the smallest possible weight of the heaviest stage."""
    items = len(ends) - 1
    best = ends.clone()
    best[0] = 0.0
    for stage in range(2, stages + 1):
        following = torch.full_like(best, float("inf"))
        for end in range(stage, items + 1):
            weight = ends[end] - ends[stage - 1 : end]
            following[end] = torch.maximum(best[stage - 1 : end], weight).min()
        best = following
    return float(best[items])
