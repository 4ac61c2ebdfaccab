"""Trial steps of a user's optimizer, to find states that no checkpoint could store."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerotrial.engine.update.checkpoint_support import StateErrors
from zerotrial.engine.update.optimizer_states import is_known

__all__ = ["check_savable"]

_PROBE_STEPS = 3
_PROBE_NUMEL = 2**16
"""Largest number of elements of the parameter on which an unknown optimizer is tried."""

_PROBE_SIDE = 1024
"""Largest side of that parameter: Shampoo's factors of a squared side then take 4 MB each."""


def check_savable(optimizer: torch.optim.Optimizer, *, full_parameters: bool) -> None:
    """Raise if no checkpoint could store an optimizer's states, before anything is trained.

    A copy of the optimizer takes three steps on a parameter with the shape of the model's smallest,
    and three on one like the largest, with sides of at most 1,024 and 65,536 elements. (Flat parts
    have 8 elements, and up to 65,536, with different gradients: numbers must come out equal.)
    Torch's optimizers and ours are not tried. States that appear only in a later step, for other
    gradients, in another group, or for larger shapes are not found here: the engine
    rejects them when they appear.

    Args:
        optimizer: The user's optimizer on the model's parameters, not stepped yet. It is the same
            on all ranks, so that all of them raise or none.
        full_parameters: Whether it will get full parameters.

    Raises:
        ConfigError: If a state can be stored neither elementwise nor with its parameter.
    """
    members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if is_known(optimizer) or not members:
        return
    refusals = StateErrors(optimizer, full_parameters, "initialize()")
    numbers: dict[str, Any] = {}
    for position, (model, shape) in enumerate(_probes(members, full_parameters=full_parameters)):
        probe = nn.Parameter(torch.zeros(shape, dtype=model.dtype))
        slope = torch.linspace(
            0, position + 1, 0 if full_parameters else probe.numel(), dtype=model.dtype
        )
        gradient = torch.zeros_like(probe) if full_parameters else slope
        early, states = _states_after_steps(optimizer, model, probe, gradient)
        state = states.pop(probe, {})
        refusals.check_common(states)
        refusals.check_one(state, probe)
        if not full_parameters:
            refusals.late(early, state, probe)
            refusals.check_number(numbers, state, probe)


def _probes(
    members: Sequence[nn.Parameter], *, full_parameters: bool
) -> Iterator[tuple[nn.Parameter, Sequence[int]]]:
    """Yield parameters to try, for their group and type, with a shape; the cheapest first."""
    smallest = min(members, key=lambda parameter: parameter.numel())
    largest = max(members, key=lambda parameter: parameter.numel())
    if not full_parameters:
        yield smallest, (8,)
        yield largest, (min(sum(p.numel() for p in members), _PROBE_NUMEL),)
        return
    yield smallest, _bounded(smallest.shape)
    if largest.shape != smallest.shape:
        yield largest, _bounded(largest.shape)


def _bounded(shape: Sequence[int]) -> Sequence[int]:
    """Halve the longest side until a parameter of the shape is cheap to try."""
    sides = list(shape)
    while math.prod(sides) > _PROBE_NUMEL or max(sides, default=0) > _PROBE_SIDE:
        sides[sides.index(max(sides))] //= 2
    return sides


def _states_after_steps(
    optimizer: torch.optim.Optimizer, model: nn.Parameter, probe: nn.Parameter, gradient: Tensor
) -> tuple[frozenset[str], dict[Any, Any]]:
    """Step a copy of the optimizer on ``probe`` instead of ``model``.

    Returns:
        The names of ``probe``'s states after one step, and the copy's entire state at the end.
    """
    twin = copy.copy(optimizer)  # torch's copy lacks a user class's attributes and hooks
    probes = {id(p): probe for group in optimizer.param_groups for p in group["params"]}
    replacements = {id(optimizer): twin, **probes}
    group = next(g for g in optimizer.param_groups if any(p is model for p in g["params"]))
    twin.param_groups = [{**copy.deepcopy({**group, "params": []}), "params": [probe]}]
    twin.state = defaultdict(dict)
    first: frozenset[str] | None = None
    try:
        for name, value in vars(optimizer).items():
            if name not in vars(twin):
                setattr(twin, name, copy.deepcopy(value, replacements))
        for _ in range(_PROBE_STEPS):
            probe.grad = gradient.clone()
            type(optimizer).step(twin)
            first = frozenset(twin.state.get(probe, {})) if first is None else first
    except Exception:  # noqa: BLE001, S110 - an unsuitable probe; training will show
        pass  # the states created so far are returned nevertheless
    states = dict(twin.state)
    return frozenset(states.get(probe, {})) if first is None else first, states
