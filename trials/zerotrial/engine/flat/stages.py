"""Stages 0, 1 and 2 on flat buckets.

:class:`FlatStage` is common to all three. Each stage defines which part of a bucket a rank updates
and how gradients are kept. N ranks, S elements in a rank's shard of a bucket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerotrial.engine.comm.communicator import Communicator, Traffic, Work
from zerotrial.engine.comm.replicas import Replicas
from zerotrial.engine.flat.gradients import (
    Averaging,
    GradientHooks,
    GradientPolicy,
    Gradients,
)
from zerotrial.engine.flat.layout import Bucket, ParameterSlot, build_buckets, choose_bucket_numel
from zerotrial.engine.flat.pending_gradients import (
    accumulated_pieces,
    resume_accumulated,
    slots_within,
)
from zerotrial.engine.flat.replicated import ReplicatedGradients
from zerotrial.engine.flat.sharded import ShardedGradients
from zerotrial.engine.flat.weights import WeightWrites, flatten_parameters
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.gradient_access import set_raw_gradient
from zerotrial.engine.module.precision import uncast_parameters
from zerotrial.engine.protocols import (
    COMMUNICATION,
    GradientSource,
    Piece,
    StageInputs,
    Updater,
    UpdaterInputs,
)
from zerotrial.engine.update.in_memory import build_updater
from zerotrial.engine.update.norm import squared_norm
from zerotrial.engine.update.optimizer_states import uncommon_numbers

__all__ = ["FlatStage", "Stage0", "Stage1", "Stage2"]

UpdaterFactory = Callable[[UpdaterInputs], Updater]


class FlatStage:
    """Base class of the flat stages, a :class:`~zerotrial.engine.protocols.Stage`.

    Args:
        inputs: Model, configuration and mesh.
        comm: Communicator of the ranks that states are sharded over.
        updater_factory: Factory of the master weights and optimizer states.
    """

    shards_states: ClassVar[bool]
    """Whether a rank updates only its shard."""

    gathers = False

    def __init__(
        self, inputs: StageInputs, comm: Communicator, updater_factory: UpdaterFactory | None
    ) -> None:
        self._inputs = inputs
        self._observer = inputs.observer
        self._comm = comm
        self._replicas = Replicas(inputs.mesh.replicate, comm.traffic, inputs.observer)
        unsplit = self.shards_states and not inputs.optimizer_factory.elementwise
        self.buckets = build_buckets(
            inputs.groups,
            [name for name, _ in inputs.module.named_parameters()],
            self._bucket_numel(),
            comm.size,
            inputs.precision.compute,
            keep=uncast_parameters(inputs.module),
            whole_parameters=unsplit,
        )
        self._owned_slices = [self._owned(bucket) for bucket in self.buckets]
        self._trained = frozenset(slot.parameter for b in self.buckets for slot in b.slots)
        self.originals = FrozenOriginals(comm, inputs.device)
        flat = flatten_parameters(inputs, self.buckets, comm, self._owned, self.originals)
        self._weights = flat.buffers
        self.updater = (updater_factory or build_updater)(self._updater_inputs(flat.masters))
        separate = updater_factory is not None or any(
            master.dtype != bucket.dtype
            for master, bucket in zip(flat.masters, self.buckets, strict=True)
        )
        del flat  # frees masters of which the updater keeps a copy elsewhere
        self._weight_writes: WeightWrites | None = None
        if separate:  # otherwise masters are views of the weights, and see every write
            self._weight_writes = WeightWrites(
                self.buckets,
                [buffer.tensor for buffer in self._weights],
                self._owned_slices,
                self.updater,
            )
        self.optimizer = self.updater.optimizer
        self.gradients = self._build_gradients()
        self.change_averages: Callable[[Gradients], None] | None = None
        """Called between averaging and norm; **Collective** where it is not None."""
        self._hooks = GradientHooks(self.buckets, self.gradients.arrived)
        self._frozen: list[list[int]] = [[] for _ in self.buckets]
        """For each bucket, the frozen parameters that the last step did not update."""
        self._counted_parameters = inputs.mesh.counted_parameters(self._trained)

    # -- a step ---------------------------------------------------------------------------------

    def leaves(self) -> Iterator[Tensor]:
        """Iterate over the tensors to which autograd writes the gradients."""
        return iter(self._trained)

    def on_unexpected_gradient(self, begin: Callable[[], None]) -> None:
        """Register a callback for gradients that arrive without :meth:`before_backward`."""
        self._hooks.on_unexpected = begin

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """Prepare for one micro-batch's gradients."""
        self.gradients.begin(boundary=boundary)
        self.gradients.pass_weight = share
        self._hooks.listening = True

    def after_backward(self, *, boundary: bool) -> None:
        """Complete the micro-batch's gradients."""
        self._hooks.listening = False
        self._hooks.end()
        self.gradients.end(boundary=boundary)

    def sweep_gradients(self) -> None:
        """Accept gradients that were written to ``.grad`` without a hook call; before the end."""
        self._hooks.sweep()

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Finish the averaging over ranks. **Collective**, at an accumulation boundary."""
        self.gradients.send_rest()
        self.gradients.finish()
        self._average_replicas([self.gradients.result(bucket.index) for bucket in self.buckets])
        if self.change_averages is not None:
            self._comm.fence()  # other ranks may still read what changes here
            self.change_averages(self.gradients)
        squares = torch.zeros(1, dtype=torch.float64, device=self._inputs.device)
        for bucket in self.buckets:
            for part in self._norm_parts(bucket):
                squares += squared_norm(part)
        # The sum also serves as a fence: a rank reaches it after its last read of other ranks'
        # buckets, so once it is known all buckets may be written again.
        squares = self._comm.sum(squares)
        with self._observer.phase(COMMUNICATION):
            self._inputs.mesh.add_over_model(squares)
        return float(squares.sqrt()) / loss_scale

    # -- gradients that user code reads and writes ------------------------------------------------

    @property
    def gathers_gradients(self) -> bool:
        """Whether the next :meth:`read_gradient` is **Collective**."""
        if self.gradients.exposed:
            return False
        replicated = not self.shards_states and self.gradients.all_sent
        return (self._comm.size > 1 and not replicated) or self._replicas.count > 1

    gradients_readable = True
    """Gradients can be read at any time between backward and step."""

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Return whether the stage manages the gradient of a parameter."""
        return parameter in self._trained

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the averaged gradient of a parameter, between a backward and a step."""
        self._expose_gradients()
        return self.gradients.read(*self._slot_indices[parameter])

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Replace the gradient of a parameter; None excludes it from the step."""
        self._expose_gradients()
        self.gradients.write(*self._slot_indices[parameter], value)

    @cached_property
    def _slot_indices(self) -> dict[Tensor, tuple[int, int]]:
        """Index of the bucket and slot of each parameter."""
        return {
            slot.parameter: (bucket.index, index)
            for bucket in self.buckets
            for index, slot in enumerate(bucket.slots)
        }

    def _expose_gradients(self) -> None:
        """Finish averaging, and give this rank all averages. **Collective** if sharded."""
        if self.gradients.exposed:
            return
        self.gradients.send_rest()
        self.gradients.finish()
        results = [self.gradients.result(bucket.index) for bucket in self.buckets]
        self._average_replicas(results)
        for bucket, result in zip(self.buckets, results, strict=True):
            if self._comm.size == 1:
                self.gradients.exposed[bucket.index] = result
            elif not self.shards_states:  # other ranks may still read the buffer
                self.gradients.exposed[bucket.index] = result.clone()
            else:
                buffer = self._comm.allocate(bucket.numel, result.dtype, self._inputs.device)
                buffer.tensor[bucket.shard(self._comm.rank)].copy_(result)
                self._comm.all_gather(buffer).wait()
                self.gradients.exposed[bucket.index] = buffer.tensor
        if self.shards_states:
            self._comm.fence()  # other ranks may still read values that user code changes next

    def _average_replicas(self, gradients: Sequence[Tensor]) -> None:
        if self._replicas.count > 1:
            self._comm.fence()  # other ranks may still read what changes here
            self._replicas.average(gradients)

    def _norm_parts(self, bucket: Bucket) -> list[Tensor]:
        """Return the parts of this rank's gradient that count in the norm."""
        part = self.gradients.norm_part(bucket.index)
        if len(self._counted_parameters) == len(self._trained):
            return [part]
        shard = bucket.shard(self._comm.rank)
        parts = []
        for slot in bucket.slots:
            if slot.parameter in self._counted_parameters:
                start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
                parts.append(part[start - shard.start : max(start, stop) - shard.start])
        return parts

    def apply(self, scale: float) -> None:
        """Multiply the gradient by ``scale``, step, publish the new weights. **Collective**."""
        self._update_masters()
        self._freeze_idle()
        deferred = []
        works = []
        for bucket in self.buckets:
            index = bucket.index
            part = self._weights[index].tensor[self._owned_slices[index]]
            if self.updater.step(index, self.gradients.result(index), scale, part):
                works.append(self._publish(index))
            else:
                deferred.append(index)
        self.updater.finish()
        works += [self._publish(index) for index in deferred]
        for work in works:
            if work is not None:
                work.wait()
        self.gradients.reset()

    def _update_masters(self) -> None:
        """Copy weights that user code has written into their masters."""
        if self._weight_writes is not None:
            self._weight_writes.update_masters()

    def _freeze_idle(self) -> None:
        """Freeze idle parameters in the updater, as plain torch does."""
        for bucket in self.buckets:
            idle = self.gradients.idle(bucket.index)
            if idle != self._frozen[bucket.index]:
                self._frozen[bucket.index] = idle
                owned, slots = self._owned(bucket), [bucket.slots[index] for index in idle]
                self.updater.freeze(bucket.index, [cut for p in slots for cut in _parts(p, owned)])

    def drop_gradients(self) -> None:
        """Clear the accumulated gradients."""
        self.gradients.reset()

    def cancel_backward(self) -> None:
        """Clear all gradients after an interrupted backward. **Collective** if some were sent."""
        self._hooks.listening = False
        self.gradients.abandon()
        for parameter in self._trained:
            set_raw_gradient(parameter, None)

    def close(self, *, give_back: bool = True) -> None:
        """Remove hooks and release memory shared with other ranks."""
        self._hooks.remove()
        for parameter in self._trained if give_back else ():
            parameter.data = parameter.data.clone()
        self.updater.close()
        self._comm.close()

    # -- checkpoints and memory accounting --------------------------------------------------------

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Iterate over the pieces that this rank owns, in a fixed order."""
        if not write:
            self._update_masters()
        for bucket in self.buckets:
            owned = self._owned(bucket)
            yielded = owned if write else bucket.shard(self._comm.rank)
            with self.updater.states(bucket.index, write=write) as states:
                for slot, start, stop in slots_within(bucket, yielded):
                    part = slice(start - owned.start, stop - owned.start)
                    yield Piece(
                        slot.name,
                        slot.parameter.shape,
                        start - slot.start,
                        stop - slot.start,
                        {kind: tensor[part] for kind, tensor in states.items()},
                    )

    @property
    def traffic(self) -> Traffic:
        """Number of elements transferred by collectives."""
        return self._comm.traffic

    @property
    def local_to_average(self) -> float | None:
        """Factor from the sum of all ranks' shares to their average; None without shares."""
        factor = self.gradients.local_to_average
        return None if factor is None else factor / self._replicas.count

    def settle_gradients(self) -> None:
        """Finish averaging in progress between boundaries. **Collective**."""
        self.gradients.settle()
        averages = [self.gradients.averaged(bucket.index) for bucket in self.buckets]
        self._average_replicas([average for average in averages if average is not None])

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Iterate over the accumulated gradients; call :meth:`settle_gradients` before."""
        owned, rank = self._owned_slices, self._comm.rank
        return accumulated_pieces(self.gradients, self.buckets, owned, rank, write=write)

    def resume_gradients(self, source: GradientSource) -> None:
        """Continue with the gradients of a checkpoint, when there are no others."""
        resume_accumulated(self.gradients, self.buckets, self._owned_slices, source)

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """Return optimizer states that are not elementwise, by parameter name."""
        other_states = self.updater.other_states(scalars)
        if not self.shards_states and self._comm.rank > 0:
            return {}  # rank 0 has the same states
        result: dict[str, Mapping[str, Any]] = {}
        if self._inputs.optimizer_factory.elementwise:
            for bucket in self.buckets:
                owned = self._owned(bucket)
                items = [(p.name, part) for p in bucket.slots for part in _parts(p, owned)]
                numbers = self.updater.member_scalars(bucket.index)
                result |= uncommon_numbers(items, numbers, bucket.group_index, scalars)
        for index, members in self._full_members():
            for slot, states in zip(members, other_states[index], strict=True):
                if states:
                    result[slot.name] = states
        return result

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore this rank's part of the merged :meth:`other_states` of all ranks."""
        if self._inputs.optimizer_factory.elementwise:
            for bucket in self.buckets:
                owned = self._owned(bucket)
                for slot in (p for p in bucket.slots if p.name in states):
                    numbers = {f"group0.{name}": v for name, v in states[slot.name].items()}
                    for part in _parts(slot, owned):
                        self.updater.set_member_scalars(bucket.index, part, numbers)
        for index, members in self._full_members():
            for position, slot in enumerate(members):
                if slot.name in states:
                    self.updater.set_other_states(index, position, states[slot.name])

    def _full_members(self) -> Iterator[tuple[int, list[ParameterSlot]]]:
        """For each bucket, yield the full parameters that this rank's optimizer updates."""
        for bucket in () if self._inputs.optimizer_factory.elementwise else self.buckets:
            owned = self._owned(bucket)
            yield bucket.index, [p for p in bucket.slots if owned.start <= p.start < owned.stop]

    def weights_changed(self) -> None:
        """Copy loaded master weights to the parameters of every rank. **Collective**."""
        self._comm.fence()
        for bucket in self.buckets:
            part = self._weights[bucket.index].tensor[self._owned(bucket)]
            with self.updater.states(bucket.index, write=False) as states:
                if states["master"].data_ptr() != part.data_ptr():
                    part.copy_(states["master"])
            work = self._publish(bucket.index)
            if work is not None:
                work.wait()
        if self._weight_writes is not None:
            self._weight_writes.forget()
        self._comm.fence()

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """Return a null context: parameters are full at all times."""
        del names
        return nullcontext()

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """Return no writers: nothing is sharded in the modules."""
        return {}

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter in full, one at a time. **Collective**."""
        self._update_masters()
        for bucket in self.buckets:
            master = self._full_master(bucket, dtype)
            for slot in bucket.slots:
                yield slot.name, master[slot.start : slot.stop].view(slot.parameter.shape)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors by kind: parameters, gradients, optimizer, master, buckets."""
        weights = [buffer.tensor for buffer in self._weights]
        frozen = [p for p in self._inputs.module.parameters() if p not in self._trained]
        parameters = [*weights, *frozen, *self.originals.tensors]
        kinds = {"parameters": parameters, **self.gradients.tensors_by_kind()}
        weight_storages = {tensor.untyped_storage().data_ptr() for tensor in weights}
        for kind, tensors in self.updater.tensors_by_kind().items():
            separate = [t for t in tensors if t.untyped_storage().data_ptr() not in weight_storages]
            kinds[kind] = kinds.get(kind, []) + separate
        return kinds

    # -- parts that differ between stages -------------------------------------------------------

    def _owned(self, bucket: Bucket) -> slice:
        """Return the range of a bucket that this rank updates."""
        return bucket.shard(self._comm.rank) if self.shards_states else slice(0, bucket.numel)

    def _publish(self, index: int) -> Work | None:
        """Start sending this rank's updated weights to the other ranks."""
        return self._comm.all_gather(self._weights[index]) if self.shards_states else None

    def _build_gradients(self) -> Gradients:
        everywhere = not self.shards_states
        return ReplicatedGradients(
            self.buckets, self._comm, self._gradient_policy(), everywhere=everywhere
        )

    def _gradient_policy(self, *, immediate: bool = False) -> GradientPolicy:
        """Return the configuration of the gradients.

        Args:
            immediate: Gradients are sent as backward produces them, else in the accumulation type.
        """
        config, precision = self._inputs.config, self._inputs.precision
        accumulate = [precision.accumulate or bucket.dtype for bucket in self.buckets]
        sent = [bucket.dtype for bucket in self.buckets] if immediate else accumulate
        return GradientPolicy(
            averaging=Averaging.of(
                self._inputs.mesh.data.size,
                operation=config.gradient_allreduce_op,
                prescale=config.prescale_gradients,
                predivide=config.gradient_predivide_factor,
            ).before_replica_mean(self._replicas.count),
            device=self._inputs.device,
            accumulate=accumulate,
            communicate=[precision.communicate or kind for kind in sent],
            overlap=config.zero_optimization.overlap_comm is not False,
            needs_all_gradients=not config.zero_optimization.ignore_unused_parameters,
        )

    # -- construction ---------------------------------------------------------------------------

    def _bucket_numel(self) -> int:
        """Return the largest number of elements of a bucket."""
        zero = self._inputs.config.zero_optimization
        return choose_bucket_numel(
            zero,
            sum(n.parameter.numel() for g in self._inputs.groups for n in g.parameters),
            stage=zero.stage,
            offload_optimizer=zero.offload_optimizer.device,
            device=self._inputs.device.type,
        )

    def _updater_inputs(self, masters: Sequence[Tensor]) -> UpdaterInputs:
        inputs = self._inputs
        shapes: list[list[tuple[int, int, torch.Size]]] | None = None
        if not inputs.optimizer_factory.elementwise:
            shapes = []
            for index, members in self._full_members():
                begin = self._owned(self.buckets[index]).start
                shapes.append(
                    [(s.start - begin, s.stop - begin, s.parameter.shape) for s in members]
                )
        return UpdaterInputs(
            masters=masters,
            group_indices=[bucket.group_index for bucket in self.buckets],
            groups=[group.options for group in inputs.groups],
            optimizer_factory=inputs.optimizer_factory,
            config=inputs.config,
            device=inputs.device,
            shapes=shapes,
        )

    def _full_master(self, bucket: Bucket, dtype: torch.dtype | None) -> Tensor:
        with self.updater.states(bucket.index, write=False) as states:
            master = states["master"]
            wide = dtype or master.dtype
            if not self.shards_states:
                return master.to(wide)
            buffer = self._comm.allocate(bucket.numel, wide, self._inputs.device)
            buffer.tensor[bucket.shard(self._comm.rank)].copy_(master)
        self._comm.all_gather(buffer).wait()
        return buffer.tensor


def _parts(slot: ParameterSlot, owned: slice) -> list[slice]:
    """Return the overlap of a parameter with a rank's part of a bucket, in the part's indices."""
    start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
    return [slice(start - owned.start, stop - owned.start)] if start < stop else []


class Stage0(FlatStage):
    """Stage 0: everything is replicated; gradients are all-reduced."""

    shards_states = False


class Stage1(FlatStage):
    """Stage 1: optimizer states and master weights are sharded; gradients are reduced once."""

    shards_states = True


class Stage2(FlatStage):
    """Stage 2: gradients are sharded, too, and reduced in every micro-batch."""

    shards_states = True

    def _build_gradients(self) -> Gradients:
        if self._comm.size == 1:  # the shard is the full gradient, so no transport buffer is needed
            return super()._build_gradients()
        return ShardedGradients(self.buckets, self._comm, self._gradient_policy(immediate=True))
