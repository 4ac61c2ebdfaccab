"""Parameters that stage 3 does not shard: scalars, which have no dimension to be cut along.

Every rank keeps them, in the type in which the model computes, as plain parameters. Rank 0 has the
master and the optimizer states, as it would have those of a matrix of one row, so that the norm and
a checkpoint count each element once. Empty parameters are replicated too. They have no state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.module.precision import kept_in_full

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.protocols import Piece, StageInputs

__all__ = ["ReplicatedBucket", "ReplicatedParameters", "is_replicated", "make_buckets"]


def is_replicated(parameter: Tensor) -> bool:
    """Return whether every rank keeps the whole parameter."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


@dataclass(frozen=True)
class ReplicatedBucket:
    """Trained scalars of one optimizer group and one type, end to end.

    Takes the place of a :class:`~zerotrial.engine.stage3.layout.FlatBucket` in the layout.
    """

    master: Tensor
    """(numel,): the weights on rank 0, zeros on the others."""

    group_index: int
    parameters: Sequence[nn.Parameter]
    comm: Communicator
    device: torch.device
    """Of the parameters."""

    factor: float
    """Multiplies the sum of the ranks' gradients."""

    def take_gradient(self) -> Tensor:
        """Take the gradients away from the parameters and average them. **Collective**.

        Returns:
            Laid out like ``master``: the average on rank 0, zeros on the others.
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

    def spread(self) -> Tensor:
        """Return rank 0's masters, (numel,), on every rank. **Collective**."""
        values = self.master.to(self.device, copy=True)
        self.comm.broadcast(values)
        return values


def make_buckets(
    inputs: StageInputs, comm: Communicator, factor: float, device: torch.device
) -> list[ReplicatedBucket]:
    """Make the masters of the trained scalars, and cast the parameters.

    Args:
        inputs: Of the stage; the scalars are in the type of their masters.
        comm: Between the ranks that states are sharded over.
        factor: Multiplies the sum of the ranks' gradients.
        device: Of the masters.
    """
    compute, kept = inputs.precision.compute, kept_in_full(inputs.module)
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
            own = compute is None or parameter in kept
            parameter.data = parameter.data.to(parameter.dtype if own else compute)
    return buckets


class ReplicatedParameters:
    """The trained scalars of a stage, their masters, and what user code writes to them.

    Args:
        buckets: Of the layout.
        names: Of their parameters.
        pieces: Walks the masters and optimizer states that this rank keeps, to write to them.
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
        """The parameters that forward reads."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    def _read(self) -> list[Tensor]:
        return [torch.stack([p.detach() for p in bucket.parameters]) for bucket in self._buckets]

    def _written(self) -> Mapping[str, Tensor]:
        """The values that user code has written since the last update, by name."""
        found = {}
        for bucket, before, now in zip(self._buckets, self._published, self._read(), strict=True):
            if not torch.equal(before, now):
                for parameter, old, new in zip(bucket.parameters, before, now, strict=True):
                    if not torch.equal(old, new):
                        found[self._names[parameter]] = new
        return found

    def update_masters(self) -> None:
        """Take what user code has written into the masters; every rank must have written it."""
        written = self._written()
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
        """Give every rank the new weights. **Collective**."""
        for bucket in self._buckets:
            for parameter, value in zip(bucket.parameters, bucket.spread(), strict=True):
                parameter.data.copy_(value)
        self._published = self._read()

    def whole(self) -> Mapping[str, Tensor]:
        """Return the master weights, by name. **Collective**."""
        written = self._written()
        found = {}
        for bucket in self._buckets:
            for parameter, value in zip(bucket.parameters, bucket.spread(), strict=True):
                name = self._names[parameter]
                found[name] = written[name].to(value.dtype) if name in written else value
        return found
