"""Stage 3 prefetching and persistence: when units are gathered and freed.

By default ``fully_shard`` frees every unit except the root after its forward and again after its
backward, and prefetches one unit in backward. The configuration keys handled here trade memory for
communication. They are DeepSpeed's, which counts single parameters. Here the smallest thing that is
gathered, kept or freed is a unit (:mod:`zerotrial.engine.module.units`).

The execution order of units is unknown before the first forward. It is assumed to be the order in
which the model lists its modules. A model that runs them in another order stays correct, but
prefetches less useful units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerolab.config.engine.zero import LIVE_LIMIT
from zerotrial.engine.stage3.internals import UnitParameters, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerolab.config.engine.zero import ZeroConfig
    from zerotrial.engine.module.units import Unit


def configure_prefetch(module: nn.Module, units: Sequence[Unit], zero: ZeroConfig) -> None:
    """Apply the configuration's prefetch and persistence limits to ``fully_shard``.

    Args:
        module: The sharded model.
        units: All units, including the root.
        zero: The ``zero_optimization`` section.
    """
    order = in_forward_order(module, units)
    for unit in kept_to_backward(order, zero):
        _sharded(unit).set_reshard_after_forward(False, recurse=False)
    if zero.stage3_prefetch_bucket_size is not None:
        _set_prefetch(order, zero.stage3_prefetch_bucket_size)
    module.register_forward_hook(_FreeAfterInference(order))


def in_forward_order(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Sort units by expected forward order: the root first, then as the model lists them."""
    position = {child: index for index, child in enumerate(module.modules())}
    return sorted(units, key=lambda unit: position[unit.module])


def kept_to_backward(order: Sequence[Unit], zero: ZeroConfig) -> set[Unit]:
    """Choose the units that stay gathered from forward to backward.

    The last units of forward are the first of backward, so they are chosen first. Between a
    unit's forward and its backward, all later units run twice, which gives its reuse distance.

    Args:
        order: From :func:`in_forward_order`. The root is always kept and counts towards the limit.
        zero: Has the limits of live elements and of the reuse distance.

    Returns:
        The units without the root; empty if neither limit is configured.
    """
    max_live, max_distance = zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
    if max_live is None and max_distance is None:
        return set()
    max_live = LIVE_LIMIT if max_live is None else max_live
    max_distance = LIVE_LIMIT if max_distance is None else max_distance
    live = order[0].numel
    distance = 0
    chosen = set()
    # A unit that does not fit is skipped, not the end of the search: an earlier, smaller one may
    # still fit. `distance` counts it nevertheless, since it runs between the others.
    for unit in reversed(order[1:]):
        if distance <= max_distance and live + unit.numel <= max_live:
            live += unit.numel
            chosen.add(unit)
        distance += 2 * unit.numel
    return chosen


def prefetch_lists(order: Sequence[Unit], numel: int) -> list[list[Unit]]:
    """Choose the units to prefetch while each unit runs.

    Args:
        order: Execution order of the units.
        numel: Limit of their elements together. The next unit is prefetched whatever its size,
            unless the limit is 0.

    Returns:
        One list per unit, the nearest unit first.
    """
    prefetched: list[list[Unit]] = []
    for index in range(len(order)):
        ahead: list[Unit] = []
        for unit in order[index + 1 :]:
            if numel == 0 or (ahead and sum(u.numel for u in [*ahead, unit]) > numel):
                break
            ahead.append(unit)
        prefetched.append(ahead)
    return prefetched


def _set_prefetch(order: Sequence[Unit], numel: int) -> None:
    for unit, ahead in zip(order, prefetch_lists(order, numel), strict=True):
        _sharded(unit).set_modules_to_forward_prefetch([_sharded(u) for u in ahead])
    # The root stays gathered throughout and its backward begins first, so it leads both orders.
    backward = [order[0], *reversed(order[1:])]
    for unit, ahead in zip(backward, prefetch_lists(backward, numel), strict=True):
        # torch replaces an empty list by its default; a unit's own prefetch costs nothing.
        _sharded(unit).set_modules_to_backward_prefetch([_sharded(u) for u in ahead or [unit]])


_kept_units: set[FSDPModule] = set()
"""Units of :func:`keep_gathered` contexts, which nothing else frees."""


@contextlib.contextmanager
def keep_gathered(units: Sequence[FSDPModule], names: frozenset[str]) -> Iterator[None]:
    """Keep the units of some parameters gathered within a context. **Collective**.

    Values written to the gathered parameters are lost when the context ends.

    Args:
        units: All units, the root last.
        names: Names of sharded parameters in the whole model.
    """
    root = cast("nn.Module", units[-1])
    name_of: dict[Any, str] = {parameter: name for name, parameter in root.named_parameters()}
    unsharded: list[tuple[FSDPModule, UnitParameters, Any]] = []
    for unit in units:
        parameters = parameters_of(unit)
        if parameters is None or unit in _kept_units:  # kept by an outer context
            continue
        if any(name_of.get(member.sharded) in names for member in parameters.members):
            unsharded.append((unit, parameters, parameters.post_forward_mesh))
    for unit, parameters, _ in unsharded:
        unit.unshard()
        parameters.post_forward_mesh = None
        parameters.stay_gathered(stay=True)
        _kept_units.add(unit)
    # Gathered weights may lie in memory shared by the ranks of a host: give each rank a copy.
    named_parameters = (root.get_parameter(name) for name in names)
    views = [(p, p.data) for p in named_parameters]
    for parameter, view in views:
        parameter.data = view.clone()
    try:
        yield
    finally:
        for parameter, view in views:
            parameter.data = view
        for unit, parameters, free_setting in unsharded:
            parameters.post_forward_mesh = free_setting
            parameters.stay_gathered(stay=False)
            _kept_units.discard(unit)
            unit.reshard()


class _FreeAfterInference:
    """Frees units after a forward that no backward follows.

    Weights written afterwards, such as a moving average, must reach the shards; gathered weights
    would hide them.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [_sharded(unit) for unit in units]

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in self._units:
                if unit not in _kept_units:
                    unit.reshard()


def _sharded(unit: Unit) -> FSDPModule:
    return cast("FSDPModule", unit.module)
