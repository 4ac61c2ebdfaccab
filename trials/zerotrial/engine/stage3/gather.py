"""How far ahead stage 3 gathers its units, and how long it keeps them, where the file says so.

Left alone, ``fully_shard`` frees every unit but the root after its forward and again after its
backward, and gathers one unit ahead in backward. The keys here trade memory for traffic. They are
DeepSpeed's, which counts parameters one by one; here a unit
(:mod:`zerotrial.engine.module.units`) is the smallest thing that is gathered, kept or freed.

Which unit runs when is not known before the first forward. Units are taken to run in the order in
which the model lists them. Where a model runs them in another order, these choices are less good,
but never wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerolab.config.engine.zero import LIVE_LIMIT
from zerotrial.engine.module.replicated_parameters import is_replicated
from zerotrial.engine.stage3.internals import UnitParameters, keep_after_forward, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerolab.config.engine.zero import ZeroConfig
    from zerotrial.engine.module.units import Unit


def set_gathering(module: nn.Module, units: Sequence[Unit], zero: ZeroConfig) -> None:
    """Tell ``fully_shard`` what the file says about gathering and keeping.

    Args:
        module: The whole model, sharded.
        units: All of them, the root among them.
        zero: The file's ``zero_optimization``.
    """
    order = in_forward_order(module, units)
    kept = kept_to_backward(order, zero)
    whole = kept_between_steps(order, zero)
    for unit in kept | whole:
        keep_after_forward(_sharded(unit))
    for unit in whole:
        _sharded(unit).set_reshard_after_backward(False, recurse=False)
    if zero.stage3_prefetch_bucket_size is not None:
        _set_prefetch(order, zero.stage3_prefetch_bucket_size)
    module.register_forward_hook(_Freeing(order))


def in_forward_order(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Sort units as a forward most likely runs them: the root first, then as the model lists them.

    Args:
        module: The whole model.
        units: Of it.
    """
    place = {child: index for index, child in enumerate(module.modules())}
    return sorted(units, key=lambda unit: place[unit.module])


def kept_to_backward(order: Sequence[Unit], zero: ZeroConfig) -> set[Unit]:
    """Choose the units that stay gathered from their forward to their backward.

    The last units of a forward are the first of its backward: they are kept first. Between a
    unit's forward and its backward, all units behind it run twice.

    Args:
        order: From :func:`in_forward_order`; the root, which is always kept, counts as held.
        zero: Says how many elements may be held, and how many may be used between a unit's
            forward and its backward.

    Returns:
        Without the root; nothing where the file gives neither limit.
    """
    most, farthest = zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
    if most is None and farthest is None:
        return set()
    most = LIVE_LIMIT if most is None else most
    farthest = LIVE_LIMIT if farthest is None else farthest
    held = order[0].numel
    distance = 0
    kept = set()
    for unit in reversed(order[1:]):
        if distance <= farthest and held + unit.numel <= most:
            held += unit.numel
            kept.add(unit)
        distance += 2 * unit.numel
    return kept


def kept_between_steps(order: Sequence[Unit], zero: ZeroConfig) -> set[Unit]:
    """Choose the units that are gathered once in a step: all their parameters are small.

    Args:
        order: From :func:`in_forward_order`.
        zero: Says what is small, and how many elements may be kept in this way.
    """
    small = zero.stage3_param_persistence_threshold or 0
    left = zero.stage3_model_persistence_threshold
    kept = set()
    for unit in order:
        if 0 < unit.largest < small and unit.numel <= left:
            left -= unit.numel
            kept.add(unit)
    return kept


def fetched_ahead(order: Sequence[Unit], numel: int) -> list[list[Unit]]:
    """Choose the units that are gathered while each unit runs.

    Args:
        order: In which units run.
        numel: Elements of all of them together; the next unit is fetched whatever its size, unless
            this is 0.

    Returns:
        One list for each unit, the nearest first.
    """
    found: list[list[Unit]] = []
    for index in range(len(order)):
        ahead: list[Unit] = []
        for unit in order[index + 1 :]:
            if numel == 0 or (ahead and sum(u.numel for u in [*ahead, unit]) > numel):
                break
            ahead.append(unit)
        found.append(ahead)
    return found


def _set_prefetch(order: Sequence[Unit], numel: int) -> None:
    for unit, ahead in zip(order, fetched_ahead(order, numel), strict=True):
        _sharded(unit).set_modules_to_forward_prefetch([_sharded(u) for u in ahead])
    # The root is at hand throughout, and its backward begins first: it runs before all others.
    backward = [order[0], *reversed(order[1:])]
    for unit, ahead in zip(backward, fetched_ahead(backward, numel), strict=True):
        # An empty list would mean torch's own choice; a unit itself is there already.
        _sharded(unit).set_modules_to_backward_prefetch([_sharded(u) for u in ahead or [unit]])


_held: set[FSDPModule] = set()
"""Units that somebody wants whole: nothing that runs frees them."""


@contextlib.contextmanager
def kept_whole(units: Sequence[FSDPModule], names: frozenset[str]) -> Iterator[None]:
    """Gather the units of some parameters, and keep them so in a context. **Collective**.

    What is written to the parameters themselves is lost at its end.

    Args:
        units: All of them, the root last.
        names: Of the parameters, in the whole model.
    """
    root = cast("nn.Module", units[-1])
    known: dict[Any, str] = {parameter: name for name, parameter in root.named_parameters()}
    wanted: list[tuple[FSDPModule, UnitParameters, Any]] = []
    for unit in units:
        parameters = parameters_of(unit)
        if parameters is None or unit in _held:  # an outer context has it already
            continue
        if any(known.get(member.sharded) in names for member in parameters.members):
            wanted.append((unit, parameters, parameters.frees_after_forward))
    for unit, parameters, _ in wanted:
        unit.unshard()
        parameters.frees_after_forward = None
        parameters.stay_gathered(stay=True)
        _held.add(unit)
    # Whole weights may lie in memory that all ranks of a machine read: here each has its own.
    parameters_wanted = (root.get_parameter(name) for name in names)
    views = [(p, p.data) for p in parameters_wanted if not is_replicated(p)]
    for parameter, view in views:
        parameter.data = view.clone()
    try:
        yield
    finally:
        for parameter, view in views:
            parameter.data = view
        for unit, parameters, before in wanted:
            parameters.frees_after_forward = before
            parameters.stay_gathered(stay=False)
            _held.discard(unit)
            unit.reshard()


class _Freeing:
    """Frees units after a forward that no backward follows.

    Weights that are written to afterwards, such as an average's, must reach the shards: whole ones
    would hide them.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [_sharded(unit) for unit in units]

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in self._units:
                if unit not in _held:
                    unit.reshard()


def _sharded(unit: Unit) -> FSDPModule:
    return cast("FSDPModule", unit.module)
