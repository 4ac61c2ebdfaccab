"""Stage 3: parameters, gradients and optimizer states are sharded; blocks are gathered to compute.

``fully_shard`` gathers a unit before its forward and again before its backward, and
reduce-scatters its gradients after; see :mod:`zerotrial.engine.fsdp_wrap` for the units. What is
ours: the global norm, scaling and clipping, the optimizer on this rank's shards through the same
:class:`~zerotrial.engine.parts.Updater` as at the other stages, and the pieces of a checkpoint.

::

    parameter   [ row 0 | row 1 | row 2 | row 3 | row 4 ]      gathered for forward and backward
    rank 0      [ row 0 | row 1 | row 2 ]                      fp32, updated in place
    rank 1                              [ row 3 | row 4 ]

N is the number of data-parallel ranks, S the elements of a parameter that a rank keeps.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3.
    Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zerolab.errors import TrialError
from zerotrial.engine.comm import Communicator, connect
from zerotrial.engine.fsdp_comm import plug_in
from zerotrial.engine.fsdp_wrap import shard_module, start
from zerotrial.engine.gradients import Averaging
from zerotrial.engine.norm import squared_norm
from zerotrial.engine.parts import Piece, UpdaterInputs
from zerotrial.engine.updater import build_updater

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.fsdp_comm import BufferRing
    from zerotrial.engine.parts import StageInputs, Updater


@dataclass(frozen=True)
class Shard:
    """One trainable parameter, as this rank sees it."""

    name: str
    """In ``module.named_parameters()``; of tied parameters the first."""

    parameter: DTensor
    """Its ``grad`` is sharded alike."""

    start: int
    """First element of the flattened parameter that this rank keeps."""

    stop: int
    """One after the last; equal to ``start`` on ranks that have no row."""

    bucket: int
    """Of the flat memory in which this rank's elements lie."""

    offset: int
    """Where they begin in it, in elements."""

    @property
    def span(self) -> slice:
        """This rank's elements in the bucket."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class FlatBucket:
    """Shards of one unit and one optimizer group, end to end, in one piece of memory.

    A shard is padded to the length that the first rank has; the padding is and stays zero.
    """

    master: Tensor
    """(S,) fp32; the shards are views of it."""

    group_index: int
    parameters: Sequence[DTensor]
    paddeds: Sequence[int]
    """Elements of each parameter's shard with its padding."""

    def take_gradient(self) -> Tensor | None:
        """Take the shards' gradients away from them, laid out like ``master``.

        A unit's gradients come out of one reduction, so that they lie as the shards do and need
        not be copied, unless some parameter has none.

        Returns:
            (S,), or None when backward reached none of them.
        """
        found = [_local(parameter.grad) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        first = found[0]
        if all(gradient is None for gradient in found):
            return None
        if first is not None and self._lie_as_shards(first, found):
            return first.as_strided((self.master.numel(),), (1,), first.storage_offset())
        together, at = torch.zeros_like(self.master), 0
        for gradient, padded in zip(found, self.paddeds, strict=True):
            if gradient is not None:
                together[at : at + gradient.numel()].copy_(gradient.reshape(-1))
            at += padded
        return together

    def _lie_as_shards(self, first: Tensor, found: Sequence[Tensor | None]) -> bool:
        memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
        for gradient, padded in zip(found, self.paddeds, strict=True):
            if gradient is None or gradient.storage_offset() != at:
                return False
            if gradient.untyped_storage().data_ptr() != memory:
                return False
            at += padded
        return True


def _local(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else cast("DTensor", tensor)._local_tensor  # noqa: SLF001 - to_local() costs more


class Stage3:
    """The :class:`~zerotrial.engine.parts.Stage` on ``fully_shard``.

    Args:
        inputs: What every stage is built from; the module is sharded already.
        units: In the order of :func:`~zerotrial.engine.fsdp_wrap.shard_module`.
        layout: Of :func:`lay_out`.
        updater: Made on the masters of the layout's buckets, in their order.
        comm: Between the data-parallel ranks.
        rings: Memory of the collectives.
    """

    def __init__(  # noqa: PLR0917 - as above
        self,
        inputs: StageInputs,
        units: Sequence[FSDPModule],
        layout: Layout,
        updater: Updater,
        comm: Communicator,
        rings: Sequence[BufferRing] = (),
    ) -> None:
        self.optimizer = updater.optimizer
        self._units = units
        self._shards = layout.shards
        self._buckets = layout.buckets
        self._updater = updater
        self._gradients: list[Tensor | None] = [None] * len(layout.buckets)
        self._comm = comm
        self._rings = rings
        self._model_group = inputs.model_group
        self._device = inputs.device
        self._every_gradient = not inputs.config.zero_optimization.ignore_unused_parameters

    def before_backward(self, *, boundary: bool) -> None:
        """Drop gradients that are not this engine's: of another's loss that came through here."""
        for shard in self._shards:
            shard.parameter.grad = None

    def after_backward(self, *, boundary: bool) -> None:
        """Add up this micro-batch's gradients, which came averaged over the ranks."""
        if boundary and self._every_gradient:
            self._check_unused()
        for index, bucket in enumerate(self._buckets):
            kept, new = self._gradients[index], bucket.take_gradient()
            if kept is None:
                self._gradients[index] = new
            elif new is not None:
                kept.add_(new)

    def _check_unused(self) -> None:
        missing = [shard.name for shard in self._shards if shard.parameter.grad is None]
        if missing:
            raise TrialError(
                f"parameters without a gradient: {', '.join(missing)}; use them in forward, "
                "freeze them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Return the norm; the averaging itself has happened in backward. **Collective**."""
        squares = torch.zeros(1, dtype=torch.float64)
        for gradient in self._gradients:
            if gradient is not None:
                squares += squared_norm(gradient).cpu()
        squares = self._comm.sum(squares.to(self._device))
        if self._model_group is not None:
            dist.all_reduce(squares, group=self._model_group)
        return math.sqrt(squares.item()) / loss_scale

    def apply(self, scale: float) -> None:
        """Update this rank's shards; the next gather publishes them. **Collective**."""
        for index, bucket in enumerate(self._buckets):
            gradient = self._gradients[index]
            if gradient is None:
                gradient = torch.zeros_like(bucket.master)
            self._gradients[index] = None
            self._updater.step(index, gradient, scale, bucket.master)
        self._updater.finish()
        self._release()

    def drop_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        self._gradients = [None] * len(self._buckets)

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk this rank's ranges, one for each parameter of which it has a row."""
        for index in range(len(self._buckets)):
            with self._updater.states(index, write=write) as states:
                for shard in self._shards:
                    if shard.bucket == index and shard.start < shard.stop:
                        mine = {name: state[shard.span] for name, state in states.items()}
                        shape = shard.parameter.shape
                        yield Piece(shard.name, shape, shard.start, shard.stop, mine)

    def scalars(self) -> dict[str, float]:
        """Optimizer scalars that are the same on all ranks."""
        return self._updater.scalars()

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore what :meth:`scalars` gave."""
        self._updater.set_scalars(scalars)

    def prepare_states(self) -> None:
        """Make the optimizer's states, so that a load can fill them."""
        self._updater.prepare_states()

    def weights_changed(self) -> None:
        """Publish loaded masters. **Collective**."""
        for index, bucket in enumerate(self._buckets):
            with self._updater.states(index, write=False) as states:
                if states["master"].data_ptr() != bucket.master.data_ptr():
                    bucket.master.copy_(states["master"])
        self._release()

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors by kind; the shards are the master weights."""
        return {
            "master": [bucket.master for bucket in self._buckets],
            "gradients": [gradient for gradient in self._gradients if gradient is not None],
            "optimizer": self._updater.held().get("optimizer", []),
            "buckets": [tensor for ring in self._rings for tensor in ring.tensors],
        }

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter, whole, one after the other. **Collective**."""
        for shard in self._shards:
            whole = cast("DTensor", shard.parameter.detach()).full_tensor()
            yield shard.name, whole if dtype is None else whole.to(dtype)

    def close(self) -> None:
        """Give memory shared with other ranks, files and threads back."""
        self._updater.close()
        self._comm.close()

    def _release(self) -> None:
        """Free gathered weights, which a forward without a backward leaves behind in the root."""
        for unit in self._units:
            unit.reshard()


def build_stage3(inputs: StageInputs) -> Stage3:
    """Shard the model and build its stage. **Collective**.

    Args:
        inputs: The model and everything else; the module is sharded in place.

    Returns:
        The stage.
    """
    comm = connect(inputs.group, inputs.device)
    units = shard_module(inputs, comm)
    layout = lay_out(inputs, units)
    start(inputs.module)
    config = inputs.config
    rings: Sequence[BufferRing] = ()
    if comm.size > 1 and inputs.device.type == "cpu":
        averaging = Averaging.of(
            comm.size,
            operation=config.gradient_allreduce_op,
            prescale=config.prescale_gradients,
            predivide=config.gradient_predivide_factor,
        )
        factor = averaging.before * averaging.after
        rings = plug_in(units, comm, inputs.device, factor, inputs.observer)
    elif config.gradient_allreduce_op == "sum":
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
    make_updater: Callable[[UpdaterInputs], Updater] = build_updater
    if config.zero_optimization.offload_optimizer.device != "none":
        from zerotrial.engine import offload

        make_updater = offload.build_updater
    updater = make_updater(
        UpdaterInputs(
            masters=[bucket.master for bucket in layout.buckets],
            group_indices=[bucket.group_index for bucket in layout.buckets],
            groups=[group.options for group in inputs.groups],
            optimizer_factory=inputs.optimizer_factory,
            config=config,
            device=inputs.device,
        )
    )
    return Stage3(inputs, units, layout, updater, comm, rings)


@dataclass(frozen=True)
class Layout:
    """Where everything that this rank keeps lies."""

    shards: Sequence[Shard]
    """One for each trainable parameter."""

    buckets: Sequence[FlatBucket]


def lay_out(inputs: StageInputs, units: Sequence[FSDPModule]) -> Layout:
    """Move this rank's shards into flat memory, one piece for each unit and optimizer group.

    Args:
        inputs: Of the stage; ``groups`` hold the parameters from before they were sharded, which
            are found again by name.
        units: Of :func:`~zerotrial.engine.fsdp_wrap.shard_module`; no forward has run yet.

    Returns:
        The shards and buckets, in the order of the units.
    """
    group_of = {
        named.name: index for index, group in enumerate(inputs.groups) for named in group.parameters
    }
    names: dict[Any, str] = {
        p: name for name, p in inputs.module.named_parameters() if name in group_of
    }
    shards: list[Shard] = []
    buckets: list[FlatBucket] = []
    for unit in units:
        state = fully_shard.state(cast("nn.Module", unit))  # type: ignore[attr-defined]
        if (owner := state._fsdp_param_group) is None:  # noqa: SLF001 - no public way
            continue
        # Gradients come in this order: those of one optimizer group must be neighbours.
        owner.fsdp_params.sort(key=lambda p: group_of[names[p.sharded_param]])
        flat, at = _memory_like([p._sharded_param_data for p in owner.fsdp_params]), 0  # noqa: SLF001
        by_group = itertools.groupby(
            owner.fsdp_params, key=lambda p: group_of[names[p.sharded_param]]
        )
        for group_index, members in by_group:
            begin, kept, paddeds = at, [], []
            for member in members:
                parameter = cast("DTensor", member.sharded_param)
                padded = _move(member, flat[at:])
                shards.append(_shard(names[parameter], parameter, len(buckets), at - begin))
                kept.append(parameter)
                paddeds.append(padded)
                at += padded
            buckets.append(FlatBucket(flat[begin:at], group_index, kept, paddeds))
    return Layout(shards, buckets)


def _memory_like(tensors: Sequence[Tensor]) -> Tensor:
    """Make room for tensors of one type end to end, where and as they are."""
    first = tensors[0]
    numel = sum(tensor.numel() for tensor in tensors)
    flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
    return flat.pin_memory() if first.is_pinned() else flat


def _move(member: Any, memory: Tensor) -> int:
    """Move a parameter's shard to the beginning of ``memory``; returns its padded length.

    ``fully_shard`` reads the shard through these two attributes, and leaves them alone as long as
    both are views of one storage.
    """
    old = member._sharded_param_data  # noqa: SLF001 - no public way
    home = memory[: old.numel()]
    home.copy_(old)
    local = member.sharded_param._local_tensor  # noqa: SLF001
    member._sharded_param_data = home  # noqa: SLF001
    member.sharded_param._local_tensor = home[: local.numel()].view(local.shape)  # noqa: SLF001
    return home.numel()


def _shard(name: str, parameter: DTensor, bucket: int, offset: int) -> Shard:
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    row = math.prod(parameter.shape[1:])
    start = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0]) * row
    stop = start + parameter._local_tensor.numel()  # noqa: SLF001 - to_local() costs more
    return Shard(name, parameter, start, stop, bucket, offset)
