"""Parameters that stage 3 does not shard: small ones, scalars and empty ones.

Every rank keeps them whole, in the type in which the model computes, as plain parameters. Masters
and optimizer states are sharded all the same, by elements: of n elements on N ranks, each rank has
``ceil(n / N)`` consecutive ones::

    parameter   [ 0 1 2 3 4 5 6 ]                   whole on every rank
    rank 0      [ 0 1 2 3 ]                         its part of the master
    rank 1      [ 4 5 6 - ]                         padded to the same length

Gradients are reduce-scattered after each backward, and new weights all-gathered after each update.
Which parameters are small says ``zero_optimization.stage3_param_persistence_threshold``. Scalars
have no dimension to be cut along, and empty parameters have no state.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerotrial.engine.module.full_tensor import is_sharded
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.module.precision import uncast_parameters

if TYPE_CHECKING:
    from zerolab.config.engine.zero import ZeroConfig
    from zerotrial.engine.comm.communicator import Buffer, Communicator
    from zerotrial.engine.protocols import StageInputs

__all__ = ["ReplicatedBucket", "ReplicatedParameters", "choose_replicated", "make_buckets"]


def choose_replicated(module: nn.Module, zero: ZeroConfig) -> set[nn.Parameter]:
    """Choose the parameters that every rank keeps whole at stage 3.

    Args:
        module: The whole model, not yet sharded.
        zero: Limits for the elements of a small parameter, and of all of them together.
    """
    small = zero.stage3_param_persistence_threshold or 0
    remaining = zero.stage3_model_persistence_threshold
    written = _written_in_forward(module)
    chosen = set()
    for parameter in module.parameters():
        numel = parameter.numel()
        if parameter.dim() == 0 or numel == 0 or not parameter.is_floating_point():
            chosen.add(parameter)
        elif numel < small and numel <= remaining and parameter not in written:
            remaining -= numel
            chosen.add(parameter)
    return chosen


def _written_in_forward(module: nn.Module) -> set[Tensor]:
    """Weights that each rank's forward would change in another way."""
    return {
        part.weight
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    }


@dataclass(frozen=True)
class ReplicatedPart:
    """Place of one parameter in a :class:`ReplicatedBucket`."""

    parameter: nn.Parameter
    offset: int
    """Of this rank's elements in the master."""

    padded: int
    """Elements of every rank's part, with padding."""

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of the flattened parameter that a rank has, and one after the last."""
        numel = self.parameter.numel()
        return min(rank * self.padded, numel), min((rank + 1) * self.padded, numel)

    def spread(self, values: Tensor, rows: Tensor) -> None:
        """Write the flattened parameter to the ranks' rows, (N, S)."""
        for rank, row in enumerate(rows):
            start, stop = self.bounds(rank)
            row[self.offset : self.offset + stop - start].copy_(values[start:stop])

    def collect(self, rows: Tensor) -> Tensor:
        """Read the parameter from the ranks' rows, (N, S)."""
        flat = rows[:, self.offset : self.offset + self.padded].reshape(-1)
        return flat[: self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class ReplicatedBucket:
    """Replicated trained parameters of one optimizer group and one type, end to end.

    Takes the place of a :class:`~zerotrial.engine.stage3.layout.FlatBucket` in the layout. S is the
    number of elements that a rank has.
    """

    master: Tensor
    """(S,): this rank's."""

    group_index: int
    parts: Sequence[ReplicatedPart]
    comm: Communicator
    device: torch.device
    """Device of the parameters."""

    factor: float
    """Factor of the sum of the ranks' gradients."""

    buffers: list[Buffer] = field(default_factory=list)
    """(N * S,), in which gradients and weights are sent; made at the first use."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """In the order of their parts."""
        return [part.parameter for part in self.parts]

    def take_gradient(self) -> Tensor:
        """Remove the parameters' gradients and average them. **Collective**.

        Returns:
            Laid out like ``master``.
        """
        buffer = self._buffer()
        rows = buffer.tensor.view(self.comm.size, -1).zero_()
        for part in self.parts:
            if (gradient := get_raw_gradient(part.parameter)) is not None:
                part.spread(gradient.reshape(-1), rows)
                set_raw_gradient(part.parameter, None)
        average = torch.empty(self.master.numel(), dtype=rows.dtype, device=self.device)
        work = self.comm.reduce_scatter(buffer, average, self.factor, add=False)
        work.wait()
        work.release()
        return average.to(self.master.device, self.master.dtype)

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Gather the masters of all ranks, in their own type or another. **Collective**.

        Yields:
            Parameters, with values that the next collective overwrites.
        """
        dtype = dtype or self.master.dtype
        buffer = self._buffer().cast(dtype).part(0, self.comm.size * self.master.numel())
        rows = buffer.tensor.view(self.comm.size, -1)
        rows[self.comm.rank].copy_(self.master)
        self.comm.all_gather(buffer).wait()
        if buffer.peers:
            self.comm.fence()  # the others have read this rank's part
        yield from ((part.parameter, part.collect(rows)) for part in self.parts)

    def adopt(self) -> bool:
        """Copy values that user code wrote to the parameters into the master.

        Returns:
            Whether this rank's part of any parameter was written to.
        """
        changed = False
        for part in self.parts:
            start, stop = part.bounds(self.comm.rank)
            master = self.master[part.offset : part.offset + stop - start]
            now = part.parameter.detach().reshape(-1)[start:stop].to(master.device)
            unchanged = master.to(now.dtype) == now  # unchanged values keep their fp32 bits
            if not bool(unchanged.all()):
                master.copy_(torch.where(unchanged, master, now))
                changed = True
        return changed

    def write(self, part: ReplicatedPart, value: Tensor) -> None:
        """Write a full tensor to this rank's part of the master."""
        start, stop = part.bounds(self.comm.rank)
        home = self.master[part.offset : part.offset + stop - start]
        home.copy_(value.reshape(-1)[start:stop])

    def _buffer(self) -> Buffer:
        if not self.buffers:
            dtype = torch.promote_types(self.master.dtype, torch.float32)
            numel = self.comm.size * self.master.numel()
            self.buffers.append(self.comm.allocate(numel, dtype, self.device))
        return self.buffers[0]


def make_buckets(
    inputs: StageInputs, comm: Communicator, factor: float, device: torch.device
) -> list[ReplicatedBucket]:
    """Make the masters of the replicated parameters, and cast the parameters.

    Args:
        inputs: Of the stage; the parameters are in the type of their masters, and all others are
            sharded.
        comm: Between the ranks that states are sharded over.
        factor: Multiplies the sum of the ranks' gradients.
        device: Of the masters.
    """
    compute, uncast = inputs.precision.compute, uncast_parameters(inputs.module)
    replicated = [p for p in inputs.module.parameters() if not is_sharded(p)]
    managed = set(replicated)
    trained = [
        (index, named.parameter)
        for index, group in enumerate(inputs.groups)
        for named in group.parameters
        if named.parameter in managed and named.parameter.numel()
    ]

    def kind(item: tuple[int, nn.Parameter]) -> tuple[int, str]:
        return item[0], str(item[1].dtype)

    buckets = []
    for (group_index, _), items in itertools.groupby(sorted(trained, key=kind), key=kind):
        parts, offset = [], 0
        for _, parameter in items:
            parts.append(ReplicatedPart(parameter, offset, -(-parameter.numel() // comm.size)))
            offset += parts[-1].padded
        master = torch.zeros(offset, dtype=parts[0].parameter.dtype, device=device)
        bucket = ReplicatedBucket(master, group_index, parts, comm, inputs.device, factor)
        for part in parts:
            bucket.write(part, part.parameter.detach())
        buckets.append(bucket)
    for parameter in replicated:
        if parameter.is_floating_point():
            own_precision = compute is None or parameter in uncast
            kind_ = parameter.dtype if own_precision else compute
            parameter.data = parameter.data.to(kind_, copy=True)  # perhaps from lent memory
    return buckets


class ReplicatedParameters:
    """Replicated trained parameters of a stage, which user code may write to.

    Args:
        buckets: Of the layout.
        names: Of their parameters.
    """

    def __init__(
        self, buckets: Sequence[ReplicatedBucket], names: Mapping[nn.Parameter, str]
    ) -> None:
        self._buckets = buckets
        self._names = names
        self.written = False
        """Whether masters were written to here, and copies of them must be. Reset by the stage."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that forward reads."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @property
    def buffers(self) -> list[Tensor]:
        """Memory in which gradients and weights are sent."""
        return [buffer.tensor for bucket in self._buckets for buffer in bucket.buffers]

    def adopt(self) -> bool:
        """Copy values that user code wrote into the masters; every rank must have written it.

        Returns:
            ``written``.
        """
        for bucket in self._buckets:
            self.written |= bucket.adopt()
        return self.written

    def publish(self) -> None:
        """Copy the new weights to every rank. **Collective**."""
        for bucket in self._buckets:
            for parameter, value in bucket.gather(bucket.parameters[0].dtype):
                parameter.data.copy_(value)

    def full_weights(self) -> Mapping[str, Tensor]:
        """Return the master weights, by name. **Collective**."""
        self.adopt()
        return {
            self._names[parameter]: value.clone()
            for bucket in self._buckets
            for parameter, value in bucket.gather()
        }

    def writers(self) -> dict[nn.Parameter, Callable[[Tensor], None]]:
        """Return functions that write full tensors to this rank's part of the masters."""
        return {
            part.parameter: functools.partial(self._write, bucket, part)
            for bucket in self._buckets
            for part in bucket.parts
        }

    def _write(self, bucket: ReplicatedBucket, part: ReplicatedPart, value: Tensor) -> None:
        bucket.write(part, value)
        self.written = True
