"""Stage 3 with parameters and gradients in files: ``offload_param: {device: nvme}``.

A rank's shards and gradients lie in a mapped file, unit by unit (see
:mod:`zerotrial.engine.memory.mapped_files`). What is in memory at a time:

- forward and backward: the unit that computes, gathered, and the next one's shards, which are read
  ahead; a unit's shards are given up as soon as it is gathered;
- backward: the gradients of one unit, which go to the file when backward has passed it;
- the norm and the update: one bucket of gradients, weights and states.

References:
    Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857, sections 5.1 and 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.memory.mapped_files import FileMemory, read_ahead, release
from zerotrial.engine.module.gradient_access import get_raw_gradient
from zerotrial.engine.stage3.internals import UnitParameters, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.module.replicated_parameters import ReplicatedBucket
    from zerotrial.engine.protocols import StageInputs
    from zerotrial.engine.stage3.layout import FlatBucket

__all__ = ["PagedGradients", "open_files", "page_units", "to_files"]


def open_files(inputs: StageInputs) -> FileMemory | None:
    """Make room in files, where the file of the engine asks for it.

    Args:
        inputs: Of the stage.

    Raises:
        ConfigError: If the optimizer wants whole parameters.
    """
    offload = inputs.config.zero_optimization.offload_param
    if offload.device != "nvme":
        return None
    if not inputs.optimizer_factory.elementwise:
        problem = (
            "zero_optimization.offload_param.device: must be none or cpu for an optimizer that "
            "looks at parameters as a whole, as it needs copies of them in memory, got nvme; use "
            "AdamW, or give an optimizer of yours, which updates each element by itself, the "
            "attribute elementwise = True"
        )
        raise ConfigError("initialize()", [problem])
    return FileMemory(Path(str(offload.nvme_path)))


def to_files(unit: FSDPModule, wholes: Sequence[Tensor], files: FileMemory) -> None:
    """Move a unit's shards into files, frozen ones too.

    Args:
        unit: Sharded just now; no forward has run.
        wholes: Its parameters as they were before.
        files: Where to.
    """
    for whole in wholes:
        release(whole)
    parameters = parameters_of(unit)
    for member in [] if parameters is None else parameters.members:
        member.move_shard(files.copy(member.shard))


def page_units(units: Sequence[FSDPModule]) -> None:
    """Have each unit read ahead and given up as the model runs.

    Args:
        units: The root last; laid out and started. They are taken to run as the model lists them.
    """
    place = {child: index for index, child in enumerate(cast("nn.Module", units[-1]).modules())}
    order = sorted(units, key=lambda unit: place[cast("nn.Module", unit)])
    owners = [found for unit in order if (found := parameters_of(unit)) is not None]
    turns = _Turns([[member.shard for member in owner.members] for owner in owners])
    for index, owner in enumerate(owners):
        owner.around_gather(
            functools.partial(turns.begin, index), functools.partial(turns.end, index)
        )


class _Turns:
    """Which unit comes next: the one behind in a forward, the one before in a backward."""

    def __init__(self, shards: Sequence[Sequence[Tensor]]) -> None:
        self._shards = shards
        self._last = (-1, False)

    def begin(self, index: int) -> None:
        """A unit is about to be gathered."""
        # A block that is computed again runs forward inside of a backward, from last to first, too.
        backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - as FSDP asks
        before, self._last = self._last, (index, backward)
        if before == self._last:
            return
        following = index - 1 if backward else index + 1
        if following < 0 and not before[1]:  # backward begins with the root, the first of all
            following = len(self._shards) - 1
        if 0 <= following < len(self._shards):
            for shard in self._shards[following]:
                read_ahead(shard)

    def end(self, index: int) -> None:
        """A unit has been gathered: its shards are not needed until the update."""
        for shard in self._shards[index]:
            release(shard)


class PagedGradients:
    """Takes each unit's gradients to the file when backward has passed it.

    Args:
        buckets: Of the layout, in the order of the units, replicated ones last.
        files: Where to.
        unit_of: For each sharded bucket the unit whose gradients are in it.
        settle: Called before gradients are read: waits until the sums over ranks are there.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket | ReplicatedBucket],
        files: FileMemory,
        unit_of: Sequence[UnitParameters],
        settle: Callable[[], None],
    ) -> None:
        self._buckets = buckets
        self._settle = settle
        self.homes = [files.allocate(b.master.numel(), b.master.dtype) for b in buckets]
        """(S,) for each bucket."""
        self.kept: list[Tensor | None] = [None] * len(buckets)
        """Of each bucket the sum so far, which is its home; None while there is none."""
        self.reached: set[Tensor] = set()
        """Parameters that this backward has made gradients of."""
        self.listening = False
        """Whether a backward of the engine's is under way."""
        self.share = 1.0
        """What its gradients are multiplied by."""
        by_unit: dict[int, tuple[UnitParameters, list[int]]] = {}
        self._replicated = range(len(unit_of), len(buckets))
        for index, unit in enumerate(unit_of):
            by_unit.setdefault(id(unit), (unit, []))[1].append(index)
        for unit, indices in by_unit.values():
            unit.after_reduction(functools.partial(self._take, indices))

    def take_replicated(self) -> None:
        """Take the gradients of what belongs to no unit, at the end of a backward."""
        self._take(self._replicated)

    def _take(self, indices: Sequence[int]) -> None:
        if not self.listening:
            return
        self._settle()
        for index in indices:
            bucket, home = self._buckets[index], self.homes[index]
            self.reached |= {p for p in bucket.parameters if get_raw_gradient(p) is not None}
            fresh = bucket.take_gradient()
            if fresh is None:
                continue
            if self.kept[index] is None:
                torch.mul(fresh, self.share, out=home)
            else:
                home.add_(fresh, alpha=self.share)
            self.kept[index] = home
            release(home)

    def forget(self) -> None:
        """Drop what was gathered."""
        self.kept = [None] * len(self._buckets)
