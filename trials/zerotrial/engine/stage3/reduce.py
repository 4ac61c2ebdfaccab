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
from zerotrial.engine.stage3.internals import ReduceScatter, ShardedParameter, parameters_of
from zerotrial.engine.stage3.publish import PublishedShards, publish_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.seams import Observer

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

    def lend(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Lend a buffer, to be filled and given to :meth:`start`. **Collective**.

        Args:
            numel: Elements, N * S.
            dtype: Of the elements.

        Returns:
            A buffer with arbitrary content.
        """
        self._ring.wait()
        return self._ring.lend(numel, dtype)

    def start(self, buffer: Buffer, out: Tensor, factor: float) -> None:
        """Start ``out = factor * sum over ranks`` of what was lent last. **Collective**."""
        self.advance()
        work = self._comm.reduce_scatter(buffer, out, factor, add=False)
        self._ring.pass_on(work)
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
        self._buffer = self._reductions.lend(numel, dtype)
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
        with self._observer.phase("reduce"):
            self._reductions.start(buffer, output_tensor, self._factor)
            if self._is_read_at_once(output_tensor):
                self._reductions.finish()

    def _is_read_at_once(self, total: Tensor) -> bool:
        """Whether anybody wants the sum before the end of backward: a cast, or a user's hook."""
        return any(
            parameter.own_dtype != total.dtype
            or parameter.sharded.grad is not None
            or parameter.has_hooks
            for parameter in self._parameters
        )


@dataclass(frozen=True)
class Plugged:
    """What :func:`plug_in` leaves behind."""

    comm: Communicator
    reductions: Reductions
    published: Sequence[PublishedShards]

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


def plug_in(
    units: Sequence[FSDPModule],
    comm: Communicator,
    device: torch.device,
    factor: float,
    observer: Observer,
) -> Plugged:
    """Make ``fully_shard`` use our collectives. **Collective**.

    Args:
        units: All of them, the root last, laid out and started.
        comm: Over the ranks that the units are sharded over.
        device: Of the gathered parameters.
        factor: What the sum of the ranks' gradients is multiplied by.
        observer: Is told when gradients are reduced.

    Returns:
        The memory of the collectives.
    """
    reductions = Reductions(comm, device)
    published = []
    for unit in units:
        if (parameters := parameters_of(unit)) is None:
            continue
        published.append(publish_shards(unit, parameters, comm, reductions.advance))
        unit.set_custom_reduce_scatter(
            SharedReduceScatter(reductions, parameters.members, factor, observer)
        )
        # The factor is applied here, once; these two keep fully_shard from dividing as well.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    plugged = Plugged(comm, reductions, published)
    plugged.publish()
    # Before the hook in which fully_shard begins to gather.
    root = cast("nn.Module", units[-1])
    root.register_forward_pre_hook(lambda *_: plugged.refresh(), prepend=True)
    return plugged
