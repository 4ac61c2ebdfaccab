"""Stage 3 with parameters and gradients in files: ``offload_param: {device: nvme}``.

A rank's shards and gradients lie in a mapped file, unit by unit (see
:mod:`zerotrial.extensions.offload.mapped_files`). Resident in memory at a time:

- forward and backward: the running unit, gathered, and the next unit's shards, read ahead. A
  unit's shards are released as soon as it is gathered.
- backward: the gradients of one unit, which move to the file when backward has passed it.
- norm and update: one bucket of gradients, weights and states.

References:
    Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857, sections 5.1 and 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.module.gradient_access import get_raw_gradient
from zerotrial.engine.stage3.internals import UnitParameters, parameters_of
from zerotrial.engine.stage3.layout import FlatBucket
from zerotrial.extensions.offload.mapped_files import FileMemory, read_ahead, release

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.module.replicated_parameters import ReplicatedBucket
    from zerotrial.engine.protocols import StageInputs

__all__ = ["ParameterFiles"]


class ParameterFiles(FileMemory):
    """Files of one rank's shards and gradients.

    Raises:
        ConfigError: If the optimizer needs full parameters.
    """

    def __init__(self, inputs: StageInputs) -> None:
        if not inputs.optimizer_factory.elementwise:
            problem = (
                "zero_optimization.offload_param.device: must be none or cpu for an optimizer that "
                "is not elementwise, as it needs full parameters in memory, got nvme; use AdamW, "
                "or set elementwise = True on an elementwise optimizer of yours"
            )
            raise ConfigError("initialize()", [problem])
        super().__init__(Path(str(inputs.config.zero_optimization.offload_param.nvme_path)))

    def adopt(self, unit: Any, originals: Sequence[Tensor]) -> None:
        """Move a unit's shards to files, including frozen ones.

        Args:
            unit: A unit that has just been sharded, before any forward.
            originals: Its parameters before sharding.
        """
        for original in originals:
            release(original)
        parameters = parameters_of(unit)
        for member in [] if parameters is None else parameters.members:
            member.move_shard(self.copy(member.shard))

    def keep_gradients(
        self, units: Sequence[Any], buckets: Sequence[Any], settle: Callable[[], None]
    ) -> FileGradients:
        """Keep the gradients in files, and read shards ahead while the model runs."""
        read_units_ahead(units)
        owners = [bucket.unit for bucket in buckets if isinstance(bucket, FlatBucket)]
        return FileGradients(buckets, self, owners, settle)


def read_units_ahead(units: Sequence[FSDPModule]) -> None:
    """Read the units' shards ahead and release them while the model runs.

    Args:
        units: All units, the root last; laid out and started. Their expected order is the order
            in which the model lists its modules.
    """
    position = {child: index for index, child in enumerate(cast("nn.Module", units[-1]).modules())}
    order = sorted(units, key=lambda unit: position[cast("nn.Module", unit)])
    owners = [group for unit in order if (group := parameters_of(unit)) is not None]
    turns = _ReadAhead([[member.shard for member in owner.members] for owner in owners])
    for index, owner in enumerate(owners):
        owner.around_gather(
            functools.partial(turns.begin, index), functools.partial(turns.end, index)
        )


class _ReadAhead:
    """Predicts the next unit: the following one in forward, the preceding one in backward."""

    def __init__(self, shards: Sequence[Sequence[Tensor]]) -> None:
        self._shards = shards
        self._last = (-1, False)

    def begin(self, index: int) -> None:
        """Read the next unit's shards ahead before this unit is gathered."""
        # Recomputed blocks run forward within backward, also in reverse order.
        backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - as FSDP asks
        before, self._last = self._last, (index, backward)
        if before == self._last:
            return
        following = index - 1 if backward else index + 1
        if following < 0 and not before[1]:  # backward starts: the root, then the last unit
            following = len(self._shards) - 1
        if 0 <= following < len(self._shards):
            for shard in self._shards[following]:
                read_ahead(shard)

    def end(self, index: int) -> None:
        """Release the shards after gathering: they are not needed until the update."""
        for shard in self._shards[index]:
            release(shard)


class FileGradients:
    """Moves each unit's gradients to the file when backward has passed the unit.

    Args:
        buckets: Buckets of the layout in the order of the units, replicated ones last.
        files: Target memory.
        unit_of: Unit of each sharded bucket.
        settle: Called before gradients are read; waits for the reductions over ranks.
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
        self.homes = [files.allocate_like(b.master.numel(), b.master) for b in buckets]
        """(S,) for each bucket."""
        self.kept: list[Tensor | None] = [None] * len(buckets)
        """Accumulated gradient of each bucket: the tensor in ``homes``, or None before any."""
        self.reached: set[Tensor] = set()
        """Parameters with gradients from the current backward."""
        self.listening = False
        """Whether a backward pass of the engine is running."""
        self.share = 1.0
        """Factor of its gradients."""
        by_unit: dict[int, tuple[UnitParameters, list[int]]] = {}
        self._replicated = range(len(unit_of), len(buckets))
        for index, unit in enumerate(unit_of):
            by_unit.setdefault(id(unit), (unit, []))[1].append(index)
        for unit, indices in by_unit.values():
            unit.after_reduction(functools.partial(self._take, indices))

    def take_replicated(self) -> None:
        """Collect gradients of replicated parameters at the end of a backward."""
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
        """Discard accumulated gradients."""
        self.kept = [None] * len(self._buckets)
