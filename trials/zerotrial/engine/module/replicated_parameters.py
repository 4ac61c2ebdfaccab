"""Parameters that stage 3 does not shard: scalars, which have no dimension to shard.

Every rank keeps them as plain parameters in the compute type. Rank 0 has the master and the
optimizer states, as if they were a matrix with one row, so that the norm and a checkpoint count
each element once. Empty parameters are replicated, too; they have no state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.module.precision import uncast_parameters

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.protocols import Piece, StageInputs

__all__ = ["ReplicatedBucket", "ReplicatedParameters", "is_replicated", "make_buckets"]


def is_replicated(parameter: Tensor) -> bool:
    """Return whether every rank keeps the full parameter."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


@dataclass(frozen=True)
class ReplicatedBucket:
    """Trained scalars of one optimizer group and one type, concatenated.

    Replaces a :class:`~zerotrial.engine.stage3.layout.FlatBucket` in the layout.
    """

    master: Tensor
    """(numel,) The weights on rank 0, zeros on other ranks."""

    group_index: int
    parameters: Sequence[nn.Parameter]
    comm: Communicator
    device: torch.device
    """Device of the parameters."""

    factor: float
    """Factor of the sum of the ranks' gradients."""

    def take_gradient(self) -> Tensor:
        """Remove the parameters' gradients and average them. **Collective**.

        Returns:
            Laid out like ``master``: the average on rank 0, zeros on other ranks.
        """
        total = torch.zeros(self.master.numel(), dtype=torch.float64, device=self.device)
        for index, parameter in enumerate(self.parameters):
            if (gradient := get_raw_gradient(parameter)) is not None:
                total[index].copy_(gradient)
                set_raw_gradient(parameter, None)
        total = self.comm.sum(total) * self.factor
        if self.comm.rank > 0:
            return torch.zeros_like(self.master)
        return total.to(self.master.device, self.master.dtype)

    def broadcast_masters(self) -> Tensor:
        """Return rank 0's masters, (numel,), on every rank. **Collective**."""
        values = self.master.to(self.device, copy=True)
        self.comm.broadcast(values)
        return values


def make_buckets(
    inputs: StageInputs, comm: Communicator, factor: float, device: torch.device
) -> list[ReplicatedBucket]:
    """Create the masters of the trained scalars, and cast the parameters.

    Args:
        inputs: Inputs of the stage; the scalars have the type of their masters.
        comm: Communicator of the ranks that states are sharded over.
        factor: Factor of the sum of the ranks' gradients.
        device: Device of the masters.
    """
    compute, uncast = inputs.precision.compute, uncast_parameters(inputs.module)
    trained = [
        (index, named.parameter)
        for index, group in enumerate(inputs.groups)
        for named in group.parameters
        if is_replicated(named.parameter) and named.parameter.numel()
    ]

    def kind(item: tuple[int, nn.Parameter]) -> tuple[int, str]:
        return item[0], str(item[1].dtype)

    buckets = []
    for (group_index, _), items in itertools.groupby(sorted(trained, key=kind), key=kind):
        members = [parameter for _, parameter in items]
        values = torch.stack([parameter.detach() for parameter in members]).to(device)
        master = values if comm.rank == 0 else torch.zeros_like(values)
        buckets.append(ReplicatedBucket(master, group_index, members, comm, inputs.device, factor))
    for parameter in inputs.module.parameters():
        if is_replicated(parameter) and parameter.is_floating_point():
            keeps_type = compute is None or parameter in uncast
            parameter.data = parameter.data.to(parameter.dtype if keeps_type else compute)
    return buckets


class ReplicatedParameters:
    """Trained scalars of a stage, their masters, and writes of user code to them.

    Args:
        buckets: Buckets of the layout.
        names: Names of their parameters.
        pieces: Iterates over this rank's masters and optimizer states, for writing.
    """

    def __init__(
        self,
        buckets: Sequence[ReplicatedBucket],
        names: Mapping[nn.Parameter, str],
        pieces: Callable[[], Iterator[Piece]],
    ) -> None:
        self._buckets = buckets
        self._names = names
        self._pieces = pieces
        self._published = self._read()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that forward reads."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    def _read(self) -> list[Tensor]:
        return [torch.stack([p.detach() for p in bucket.parameters]) for bucket in self._buckets]

    def _user_writes(self) -> Mapping[str, Tensor]:
        """Return the values that user code has written since the last update, by name."""
        written = {}
        for bucket, before, now in zip(self._buckets, self._published, self._read(), strict=True):
            if not torch.equal(before, now):
                for parameter, old, new in zip(bucket.parameters, before, now, strict=True):
                    if not torch.equal(old, new):
                        written[self._names[parameter]] = new
        return written

    def update_masters(self) -> None:
        """Copy values written by user code into the masters; all ranks must have written them."""
        written = self._user_writes()
        if not written:
            return
        for piece in self._pieces():
            if piece.name in written:
                piece.tensors["master"].copy_(written[piece.name].reshape(-1))
        for bucket in self._buckets if self._buckets[0].comm.rank == 0 else ():
            for index, parameter in enumerate(bucket.parameters):
                if self._names[parameter] in written:
                    bucket.master[index].copy_(written[self._names[parameter]])
        self._published = self._read()

    def publish(self) -> None:
        """Copy the new weights to every rank. **Collective**."""
        for bucket in self._buckets:
            for parameter, value in zip(bucket.parameters, bucket.broadcast_masters(), strict=True):
                parameter.data.copy_(value)
        self._published = self._read()

    def full_weights(self) -> Mapping[str, Tensor]:
        """Return the master weights, by name. **Collective**."""
        written = self._user_writes()
        weights = {}
        for bucket in self._buckets:
            for parameter, value in zip(bucket.parameters, bucket.broadcast_masters(), strict=True):
                name = self._names[parameter]
                weights[name] = written[name].to(value.dtype) if name in written else value
        return weights
