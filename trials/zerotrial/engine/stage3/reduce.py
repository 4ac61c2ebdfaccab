"""Stage 3's collectives on CPU, in place of those that ``fully_shard`` comes with.

As shipped it calls gloo, whose reduce-scatter is an all-reduce inside and whose data pass through
sockets. Here ranks of one host share memory; on different hosts they use the engine's own
all-to-all.

N ranks, S elements of a unit on each: what is gathered or reduced has N * S elements, and rank r's
part is the r-th S, exactly as in a :class:`~zerotrial.engine.comm.communicator.Buffer`.

**Gathering**: see :mod:`zerotrial.engine.stage3.publish`.

**Reducing** overlaps backward: a collective is started, and advanced without waiting whenever
another one starts; only the end of backward waits. The buffers are used in turn, each again when no
rank reads it any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine.comm.communicator import Buffer, Communicator, Work
from zerotrial.engine.comm.ring import Ring
from zerotrial.engine.comm.timed_collectives import COMMUNICATION
from zerotrial.engine.module.gradient_access import get_raw_gradient
from zerotrial.engine.stage3.internals import (
    ReduceScatter,
    ShardedParameter,
    UnitParameters,
    cut_into_shards,
    parameters_of,
    set_all_gather,
    set_reduce_scatter,
)
from zerotrial.engine.stage3.publish import GroupAllGather, PublishedShards, publish_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.protocols import Observer

_RING = 3


class Reductions:
    """Sums over ranks that are under way, and the buffers that they read, which are used in turn.

    Args:
        comm: Allocates buffers; every rank must ask for the same sizes in the same order.
        device: Of the buffers.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._works: deque[Work] = deque()
        self._ring = Ring(comm, device, _RING, self._works)

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's memory."""
        return self._ring.tensors

    @property
    def ranks(self) -> int:
        """N."""
        return self._comm.size

    def get(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Lend a buffer, to be filled and given to :meth:`start`. **Collective**.

        Args:
            numel: Elements, N * S.
            dtype: Of the elements.

        Returns:
            A buffer with arbitrary content.
        """
        self._ring.wait()
        return self._ring.get(numel, dtype)

    def start(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool = False) -> None:
        """Start ``out = factor * sum over ranks`` of what was lent last. **Collective**.

        Args:
            buffer: Filled.
            out: (S,).
            factor: As above.
            add: To what is in ``out``.
        """
        self.advance()
        work = self._comm.reduce_scatter(buffer, out, factor, add=add)
        self._ring.advance_turn(work)
        self._works.append(work)
        self.advance()

    def advance(self) -> None:
        """Do what can be done without waiting."""
        while self._works and self._works[0].advance():
            self._works.popleft()

    def finish(self) -> None:
        """Wait until every sum is there."""
        while self._works:
            self._works.popleft().wait()


class SharedReduceScatter(ReduceScatter):
    """Sums a unit's gradients; see ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        reductions: Do the work.
        parameters: Of the unit.
        factor: What the sum over ranks is multiplied by: 1 / N for the mean.
        observer: Is told when gradients are reduced.
    """

    def __init__(
        self,
        reductions: Reductions,
        parameters: Sequence[ShardedParameter],
        factor: float,
        observer: Observer,
    ) -> None:
        self._reductions = reductions
        self._parameters = parameters
        self._factor = factor
        self._observer = observer
        self._buffer: Buffer | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Lend the memory to be summed, then make that of the sum, which becomes gradients."""
        numel = math.prod(int(length) for length in size)
        if self._buffer is not None:
            return torch.empty(numel, dtype=dtype, device=device)
        self._buffer = self._reductions.get(numel, dtype)
        return self._buffer.tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Start to sum every rank's part and to scale it. **Collective**."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.tensor.data_ptr() != input_tensor.data_ptr():
            raise RuntimeError("reduce-scatter of memory that was not allocated for it")
        with self._observer.phase(COMMUNICATION):
            self._reductions.start(buffer, output_tensor, self._factor)
            if self._is_read_at_once(output_tensor):
                self._reductions.finish()

    def _is_read_at_once(self, total: Tensor) -> bool:
        """Whether anybody wants the sum before the end of backward: a cast, or an older sum."""
        return any(
            parameter.own_dtype != total.dtype or get_raw_gradient(parameter.sharded) is not None
            for parameter in self._parameters
        )


class UnitGradients:
    """The gradients that one backward makes in one unit, of which this rank gets its part.

    ``fully_shard`` would make a sharded tensor for each parameter, which the stage only puts
    together again. It still does wherever somebody may look at those.

    Args:
        reductions: Do the work.
        parameters: Of the unit; some are trained.
        factor: What the sum over ranks is multiplied by.
        dtype: In which gradients travel and are kept.
        observer: Is told when gradients are reduced.
    """

    def __init__(
        self,
        reductions: Reductions,
        parameters: UnitParameters,
        factor: float,
        dtype: torch.dtype,
        observer: Observer,
    ) -> None:
        self._reductions = reductions
        self._trained = parameters.trained
        self._factor = factor
        self._dtype = dtype
        self._observer = observer
        self.numel = sum(member.shard.numel() for member in self._trained)
        """S: elements of this rank's part."""
        self.listening = False
        """Whether a backward of the engine's is under way."""
        self.part: Tensor | None = None
        """(S,): what the backward under way has made; final when the reductions are finished."""
        self.reached: set[Tensor] = set()
        """The parameters, as the stage knows them, that have a gradient in it."""
        parameters.reduce_with(self._reduce, self._is_wanted)

    def forget(self, *, listening: bool) -> None:
        """Begin or end a backward."""
        self.listening, self.part = listening, None
        self.reached.clear()

    def _is_wanted(self) -> bool:
        return self.listening

    def _reduce(self, found: list[Tensor | None]) -> None:
        """Start to sum every rank's gradients and to scale them. **Collective**."""
        self.reached |= {
            member.sharded
            for member, gradient in zip(self._trained, found, strict=True)
            if gradient is not None
        }
        ranks = self._reductions.ranks
        with self._observer.phase(COMMUNICATION):
            buffer = self._reductions.get(ranks * self.numel, self._dtype)
            cut_into_shards(
                [
                    member.zeros() if gradient is None else gradient
                    for member, gradient in zip(self._trained, found, strict=True)
                ],
                buffer.tensor,
                ranks,
            )
            found.clear()  # gives the memory of the gradients back
            add = self.part is not None  # the unit ran twice in one forward
            if self.part is None:
                self.part = torch.empty(self.numel, dtype=self._dtype)
            self._reductions.start(buffer, self.part, self._factor, add=add)


@dataclass(frozen=True)
class Plugged:
    """What :func:`plug_in` leaves behind."""

    comm: Communicator
    reductions: Reductions
    published: Sequence[PublishedShards]
    summed: Sequence[UnitGradients]
    """Of units whose gradients do not pass through sharded tensors: all, or none."""

    def begin_backward(self) -> None:
        """Get ready for the gradients of a backward of the engine's."""
        self.reductions.finish()  # of one that raised
        for unit in self.summed:
            unit.forget(listening=True)

    def end_backward(self) -> None:
        """Forget what the last backward made."""
        for unit in self.summed:
            unit.forget(listening=False)

    def cut(self, numels: Sequence[int]) -> list[Tensor | None]:
        """ShardSpec what this backward has made into buckets.

        Args:
            numels: Of all buckets, in the order of the units.
        """
        found: list[Tensor | None] = []
        for unit in self.summed:
            at = 0
            while at < unit.numel:
                length = numels[len(found)]
                found.append(None if unit.part is None else unit.part[at : at + length])
                at += length
        return found + [None] * (len(numels) - len(found))

    def has_reached(self, parameter: Tensor) -> bool:
        """Whether this backward has made a gradient of a parameter that hangs nowhere."""
        return any(parameter in unit.reached for unit in self.summed)

    def publish(self) -> None:
        """Show the other ranks this rank's new shards. **Collective**; nobody may be reading."""
        for unit in self.published:
            unit.write()
        self.comm.fence()

    def refresh(self) -> None:
        """Publish again if user code has written to a shard of any rank. **Collective**."""
        stale = not all(unit.is_current() for unit in self.published)
        if float(self.comm.sum(torch.tensor([stale], dtype=torch.float64))) > 0:
            self.publish()  # all ranks are here, so that nobody reads

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's memory."""
        shards = [tensor for unit in self.published for tensor in unit.tensors]
        return [*self.reductions.tensors, *shards]


def _sums_as_kept(parameters: UnitParameters, dtype: torch.dtype | None) -> bool:
    """Whether a unit's gradients travel in the type in which they are kept."""
    return all((dtype or p.forward_dtype) == p.own_dtype for p in parameters.trained)


def plug_in(
    units: Sequence[FSDPModule],
    comm: Communicator,
    device: torch.device,
    *,
    factor: float,
    dtype: torch.dtype | None,
    observer: Observer,
    apart: bool = False,
) -> Plugged:
    """Make ``fully_shard`` use our collectives. **Collective**.

    Args:
        units: All of them, the root last, laid out and started.
        comm: Over the ranks that the units are sharded over.
        device: Of the gathered parameters.
        factor: What the sum of the ranks' gradients is multiplied by.
        dtype: In which gradients travel; None: in which forward computes.
        observer: Is told when gradients are reduced.
        apart: Ranks have no memory in common for what is in files: units are gathered by copying,
            and their gradients come one unit at a time.

    Returns:
        The memory of the collectives.
    """
    reductions = Reductions(comm, device)
    owners = [(unit, found) for unit in units if (found := parameters_of(unit)) is not None]
    published = []
    for unit, parameters in owners:
        if apart:
            set_all_gather(unit, GroupAllGather(comm, observer))
        else:
            published.append(publish_shards(unit, parameters, comm, reductions.advance, observer))
    for unit, parameters in owners:
        # The factor is applied by it, once.
        set_reduce_scatter(
            unit, SharedReduceScatter(reductions, parameters.members, factor, observer)
        )
    summed: list[UnitGradients] = []
    if not apart and all(_sums_as_kept(p, dtype) for _, p in owners):
        summed = [
            UnitGradients(reductions, p, factor, p.trained[0].own_dtype, observer)
            for _, p in owners
            if p.trained
        ]
    plugged = Plugged(comm, reductions, published, summed)
    plugged.publish()
    # Before the hook in which fully_shard begins to gather.
    root = cast("nn.Module", units[-1])
    root.register_forward_pre_hook(lambda *_: plugged.refresh(), prepend=True)
    return plugged
