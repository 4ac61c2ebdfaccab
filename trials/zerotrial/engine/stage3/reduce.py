"""Stage 3 collectives on CPU that replace those of ``fully_shard``.

By default it calls gloo, whose reduce-scatter is an all-reduce and whose data pass through sockets.
Here ranks of one host use shared memory; between hosts they use the engine's own all-to-all.

N is the number of ranks, S the elements of a unit on each. Gathered and reduced memory has N * S
elements, and rank r's shard is the r-th S, as in a
:class:`~zerotrial.engine.comm.communicator.Buffer`.

**Gathering**: a communicator of ranks that share memory publishes shards, which are read in place.
Between hosts a unit is gathered through torch.distributed into memory of its own.

**Reducing** overlaps backward. A collective is started, and advances without waiting whenever
another one starts. Only the end of backward waits. Buffers are used in turn; each is reused when no
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

from zerotrial.engine.comm.communicator import Buffer, Communicator, Ring, Work
from zerotrial.engine.module.gradient_access import get_raw_gradient
from zerotrial.engine.protocols import COMMUNICATION
from zerotrial.engine.stage3.internals import (
    AllGather,
    ReduceScatter,
    ShardedParameter,
    UnitParameters,
    copy_as_shards,
    parameters_of,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.protocols import Observer

# Backward fills one buffer while earlier ones are being reduced or read by slower ranks.
_RING = 3


class Reductions:
    """Pending reductions over ranks and their buffers, which are used in turn.

    Args:
        comm: Allocates buffers. All ranks must request the same sizes in the same order.
        device: Device of the buffers.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._works: deque[Work] = deque()
        self._ring = Ring(comm, device, _RING, self._works)

    @property
    def tensors(self) -> list[Tensor]:
        """Buffers of this rank."""
        return self._ring.tensors

    @property
    def ranks(self) -> int:
        """N."""
        return self._comm.size

    def get(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return a buffer to fill and to pass to :meth:`start`. **Collective**.

        Args:
            numel: Elements, N * S.
            dtype: Type of the elements.

        Returns:
            A buffer with arbitrary content.
        """
        self._ring.wait()
        return self._ring.get(numel, dtype)

    def start(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool = False) -> None:
        """Start ``out = factor * sum over ranks`` of the last buffer. **Collective**.

        Args:
            buffer: The filled buffer.
            out: (S,).
            factor: Factor of the sum.
            add: Add the result to ``out`` instead.
        """
        # Before and after: no thread makes progress on a collective, so each start must also move
        # the earlier ones. Otherwise all of them would be left to the end of backward and hide
        # nothing.
        self.advance()
        work = self._comm.reduce_scatter(buffer, out, factor, add=add)
        self._ring.advance_turn(work)
        self._works.append(work)
        self.advance()

    def advance(self) -> None:
        """Complete the reductions that need no waiting."""
        while self._works and self._works[0].advance():
            self._works.popleft()

    def finish(self) -> None:
        """Wait for all pending reductions."""
        while self._works:
            self._works.popleft().wait()


class SharedReduceScatter(ReduceScatter):
    """Sums a unit's gradients; see ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        reductions: Pending reductions and buffers.
        parameters: Parameters of the unit.
        factor: Factor of the sum over ranks: 1 / N for the mean.
        observer: Times the reductions.
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
        """Return the input of the reduction on the first call, its output on the second."""
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
        """Start the scaled sum of every rank's input. **Collective**."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.tensor.data_ptr() != input_tensor.data_ptr():
            raise RuntimeError("reduce-scatter of memory that was not allocated for it")
        with self._observer.phase(COMMUNICATION):
            self._reductions.start(buffer, output_tensor, self._factor)
            if self._is_read_early(output_tensor):
                self._reductions.finish()

    def _is_read_early(self, total: Tensor) -> bool:
        """Whether the sum is read before the end of backward: by a cast, or by accumulation."""
        return any(
            parameter.own_dtype != total.dtype or get_raw_gradient(parameter.sharded) is not None
            for parameter in self._parameters
        )


class GroupAllGather(AllGather):
    """Gathers a unit's parameters between hosts; see ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, comm: Communicator, observer: Observer) -> None:
        self._comm = comm
        self._observer = observer

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the memory of the gathered unit."""
        return torch.empty(math.prod(int(length) for length in size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Fill the other ranks' shards. **Collective**."""
        self._comm.traffic.add("all_gather", output_tensor.numel())
        shard = input_tensor.clone()  # gloo copies the input into the output
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._observer.phase(COMMUNICATION):
            call(output_tensor, shard, group=group)


class UnitGradients:
    """This rank's shards of the gradients that one backward computes in one unit.

    ``fully_shard`` would create a sharded tensor per parameter, which the stage would only
    concatenate again. It still does where such tensors may be read.

    Args:
        reductions: Pending reductions and buffers.
        parameters: Parameters of the unit, of which some are trained.
        factor: Factor of the sum over ranks.
        dtype: Type in which gradients are reduced and stored.
        observer: Times the reductions.
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
        """S: elements of this rank's shard."""
        self.listening = False
        """Whether a backward pass of the engine is running."""
        self.part: Tensor | None = None
        """(S,): gradient of the current backward; final when the reductions are finished."""
        self.reached: set[Tensor] = set()
        """Sharded parameters with a gradient in it."""
        parameters.reduce_with(self._reduce, self._is_wanted)

    def forget(self, *, listening: bool) -> None:
        """Begin or end a backward."""
        self.listening, self.part = listening, None
        self.reached.clear()

    def _is_wanted(self) -> bool:
        return self.listening

    def _reduce(self, gradients: list[Tensor | None]) -> None:
        """Start the scaled sum of every rank's gradients. **Collective**."""
        self.reached |= {
            member.sharded
            for member, gradient in zip(self._trained, gradients, strict=True)
            if gradient is not None
        }
        # Missing gradients count as zeros: all ranks must take part in each reduction.
        complete = [
            member.zeros() if gradient is None else gradient
            for member, gradient in zip(self._trained, gradients, strict=True)
        ]
        gradients.clear()
        ranks = self._reductions.ranks
        if ranks == 1:
            self._add(complete)
            return
        add = self.part is not None  # the unit ran twice in one forward
        if self.part is None:
            self.part = torch.empty(self.numel, dtype=self._dtype)
        with self._observer.phase(COMMUNICATION):
            buffer = self._reductions.get(ranks * self.numel, self._dtype)
            copy_as_shards(complete, buffer.tensor, ranks)
            complete.clear()  # frees the full gradients
            self._reductions.start(buffer, self.part, self._factor, add=add)

    def _add(self, gradients: list[Tensor]) -> None:
        """Add the gradients of a single rank to its part."""
        new = torch.empty(self.numel, dtype=self._dtype, device=gradients[0].device)
        copy_as_shards(gradients, new, 1)
        if self._factor != 1.0:
            new.mul_(self._factor)
        self.part = new if self.part is None else self.part.add_(new)


@dataclass(frozen=True)
class CustomCollectives:
    """Collectives installed by :func:`install_collectives`."""

    comm: Communicator
    reductions: Reductions
    published: Sequence[Any]
    """Shards in memory shared by the ranks, by unit."""

    summed: Sequence[UnitGradients]
    """Gradients of units that bypass sharded tensors: of all units, or of none."""

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward pass of the engine."""
        self.reductions.finish()  # of a backward that raised
        for unit in self.summed:
            unit.forget(listening=True)

    def end_backward(self) -> None:
        """Discard the results of the last backward."""
        for unit in self.summed:
            unit.forget(listening=False)

    def cut(self, numels: Sequence[int]) -> list[Tensor | None]:
        """Split the gradients of this backward into buckets.

        Args:
            numels: Elements of all buckets, in the order of the units.
        """
        parts: list[Tensor | None] = []
        for unit in self.summed:
            at = 0
            while at < unit.numel:
                length = numels[len(parts)]
                parts.append(None if unit.part is None else unit.part[at : at + length])
                at += length
        return parts + [None] * (len(numels) - len(parts))

    def has_reached(self, parameter: Tensor) -> bool:
        """Whether this backward has computed a gradient of a sharded parameter."""
        return any(parameter in unit.reached for unit in self.summed)

    def publish(self) -> None:
        """Publish this rank's new shards. **Collective**; no rank may be reading."""
        for unit in self.published:
            unit.write()
        self.comm.fence()

    def refresh(self) -> None:
        """Publish again if user code has written to a shard of any rank. **Collective**."""
        if not self.published:
            return
        stale = not all(unit.is_current() for unit in self.published)
        if float(self.comm.sum(torch.tensor([stale], dtype=torch.float64))) > 0:
            self.publish()  # all ranks are here, so none reads

    @property
    def tensors(self) -> list[Tensor]:
        """Shared and reduction buffers of this rank."""
        shards = [tensor for unit in self.published for tensor in unit.tensors]
        return [*self.reductions.tensors, *shards]


def _reduces_in_stored_type(parameters: UnitParameters, dtype: torch.dtype | None) -> bool:
    """Whether a unit's gradients are reduced in the type in which they are stored."""
    return all((dtype or p.forward_dtype) == p.own_dtype for p in parameters.trained)


def install_collectives(
    units: Sequence[FSDPModule],
    comm: Communicator,
    device: torch.device,
    *,
    factor: float,
    dtype: torch.dtype | None,
    observer: Observer,
    apart: bool = False,
) -> CustomCollectives:
    """Install our collectives in ``fully_shard``. **Collective**.

    Args:
        units: All units, the root last, laid out and started.
        comm: Communicator of the ranks that shard the units.
        device: Device of the gathered parameters.
        factor: Factor of the sum of the ranks' gradients.
        dtype: Type in which gradients are reduced; None: type of forward.
        observer: Times the reductions.
        apart: Shards are in files and cannot be shared: units are gathered by copying, and their
            gradients are reduced one unit at a time.

    Returns:
        The installed collectives.
    """
    reductions = Reductions(comm, device)
    publish = getattr(comm, "publish_shards", None)  # of ranks that share memory
    owners = [(unit, group) for unit in units if (group := parameters_of(unit)) is not None]
    published = []
    for unit, parameters in owners:
        shared = None
        if comm.size == 1:
            parameters.gather_alone()
        elif not apart and publish is not None:
            shared = publish(parameters, reductions.advance)
        if shared is not None:
            published.append(shared)
        elif comm.size > 1:
            unit.set_custom_all_gather(GroupAllGather(comm, observer))
    for unit, parameters in owners if comm.size > 1 else ():
        unit.set_custom_reduce_scatter(
            SharedReduceScatter(reductions, parameters.members, factor, observer)
        )
        # The collective applies the factor, once.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    unit_gradients: list[UnitGradients] = []
    # A single rank reduces nothing, so that the type of the reduction does not matter.
    if comm.size == 1 or (not apart and all(_reduces_in_stored_type(p, dtype) for _, p in owners)):
        unit_gradients = [
            UnitGradients(reductions, p, factor, p.trained[0].own_dtype, observer)
            for _, p in owners
            if p.trained
        ]
    collectives = CustomCollectives(comm, reductions, published, unit_gradients)
    collectives.publish()
    if published:
        # Prepended: the shards must be current before the hook of fully_shard gathers them.
        root = cast("nn.Module", units[-1])
        root.register_forward_pre_hook(lambda *_: collectives.refresh(), prepend=True)
    return collectives
