"""Stages 0, 1 and 2 on flat buckets.

What the three share is in :class:`FlatStage`; each stage adds which part of a bucket a rank
updates, and how gradients are kept. N ranks, S elements in a rank's shard of a bucket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerotrial.engine.comm.communicator import Communicator, Traffic, Work
from zerotrial.engine.comm.replicas import Replicas
from zerotrial.engine.comm.timed_collectives import COMMUNICATION
from zerotrial.engine.flat.bucket_size import choose_bucket_numel
from zerotrial.engine.flat.gradients import Averaging, Gradients, Handling
from zerotrial.engine.flat.hooks import GradientHooks
from zerotrial.engine.flat.layout import Bucket, Place, cut_into_buckets
from zerotrial.engine.flat.pending_gradients import gathered_pieces, places_within, resume_gathered
from zerotrial.engine.flat.replicated import WholeGradients
from zerotrial.engine.flat.sharded import ShardedGradients
from zerotrial.engine.flat.tied_gradients import Ties
from zerotrial.engine.flat.weight_writes import WrittenWeights
from zerotrial.engine.flat.weights import flatten_parameters
from zerotrial.engine.module.frozen import FrozenOriginals
from zerotrial.engine.module.gradient_access import set_raw_gradient
from zerotrial.engine.module.precision import kept_in_full
from zerotrial.engine.protocols import GradientSource, Piece, StageInputs, Updater, UpdaterInputs
from zerotrial.engine.update.in_memory import build_updater
from zerotrial.engine.update.norm import squared_norm
from zerotrial.engine.update.optimizer_states import uncommon_numbers

__all__ = ["FlatStage", "Stage0", "Stage1", "Stage2"]

UpdaterFactory = Callable[[UpdaterInputs], Updater]


class FlatStage:
    """See :class:`~zerotrial.engine.protocols.Stage`.

    Args:
        inputs: The model and everything else.
        comm: Between the ranks that states are sharded over.
        updater_factory: Where master weights and optimizer states live.
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
        whole = self.shards_states and not inputs.optimizer_factory.elementwise
        self.buckets = cut_into_buckets(
            inputs.groups,
            [name for name, _ in inputs.module.named_parameters()],
            self._bucket_numel(),
            comm.size,
            inputs.precision.compute,
            keep=kept_in_full(inputs.module),
            whole_parameters=whole,
        )
        self._trained = frozenset(place.parameter for b in self.buckets for place in b.places)
        self.originals = FrozenOriginals(comm, inputs.device)
        flat = flatten_parameters(inputs, self.buckets, comm, self._owned, self.originals)
        self._weights = flat.buffers
        self._updater = (updater_factory or build_updater)(self._updater_inputs(flat.masters))
        del flat  # masters that the updater keeps elsewhere take no memory here
        self._written = WrittenWeights(
            self.buckets,
            [buffer.tensor for buffer in self._weights],
            [self._owned(bucket) for bucket in self.buckets],
            self._updater,
        )
        self.optimizer = self._updater.optimizer
        self.gradients = self._build_gradients()
        self.ties = Ties(self.buckets, comm)
        self._hooks = GradientHooks(self.buckets, self.gradients.arrived)
        self._held: list[list[int]] = [[] for _ in self.buckets]
        """For each bucket, the frozen parameters that the last step has left alone."""
        self._counting = inputs.mesh.counts(self._trained)

    # -- a step ---------------------------------------------------------------------------------

    def leaves(self) -> Iterator[Tensor]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return iter(self._trained)

    def when_unannounced(self, begin: Callable[[], None]) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._hooks.unannounced = begin

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self.gradients.begin(boundary=boundary)
        self.gradients.share = share
        self._hooks.listening = True

    def after_backward(self, *, boundary: bool) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._hooks.listening = False
        self._hooks.end()
        self.gradients.end(boundary=boundary)

    def sweep_gradients(self) -> None:
        """Take what a backward pass wrote to ``.grad`` with no hook called; before its end."""
        self._hooks.sweep()

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self.gradients.send_rest()
        self.gradients.finish()
        self._average_replicas([self.gradients.result(bucket.index) for bucket in self.buckets])
        with self._observer.phase("tied_gradients") if self.ties.exist else nullcontext():
            self.ties.add(self.gradients)
        squares = torch.zeros(1, dtype=torch.float64, device=self._inputs.device)
        for bucket in self.buckets:
            for part in self._counted(bucket):
                squares += squared_norm(part)
        # Every rank comes here after it has read what it needs of the others' buckets, so once
        # the sum is known the buckets may be written again.
        squares = self._comm.sum(squares)
        with self._observer.phase(COMMUNICATION):
            self._inputs.mesh.add_over_model(squares)
        return float(squares.sqrt()) / loss_scale

    # -- gradients that user code reads and writes ------------------------------------------------

    @property
    def gathers_gradients(self) -> bool:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        if self.gradients.exposed:
            return False
        whole = not self.shards_states and self.gradients.all_sent
        return (self._comm.size > 1 and not whole) or self._replicas.count > 1

    gradients_readable = True
    """See :class:`~zerotrial.engine.protocols.Stage`."""

    def owns_gradient(self, parameter: Tensor) -> bool:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return parameter in self._trained

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._expose_gradients()
        return self.gradients.read(*self._places[parameter])

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._expose_gradients()
        self.gradients.write(*self._places[parameter], value)

    @cached_property
    def _places(self) -> dict[Tensor, tuple[int, int]]:
        """The bucket of each parameter, and its place there."""
        return {
            place.parameter: (bucket.index, index)
            for bucket in self.buckets
            for index, place in enumerate(bucket.places)
        }

    def _expose_gradients(self) -> None:
        """Finish the averaging, and let this rank have all of it. **Collective** where sharded."""
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
            self._comm.fence()  # others may still read what user code is going to change

    def _average_replicas(self, gradients: Sequence[Tensor]) -> None:
        if self._replicas.count > 1:
            self._comm.fence()  # others may still read what is changed here
            self._replicas.average(gradients)

    def _counted(self, bucket: Bucket) -> list[Tensor]:
        """Parts of this rank's gradient whose squares it adds to the norm."""
        part = self.gradients.norm_part(bucket.index)
        if len(self._counting) == len(self._trained):
            return [part]
        own = bucket.shard(self._comm.rank)
        parts = []
        for place in bucket.places:
            if place.parameter in self._counting:
                start, stop = max(place.start, own.start), min(place.stop, own.stop)
                parts.append(part[start - own.start : max(start, stop) - own.start])
        return parts

    def apply(self, scale: float) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._written.adopt()
        self._hold_frozen()
        late = []
        works = []
        for bucket in self.buckets:
            index = bucket.index
            part = self._weights[index].tensor[self._owned(bucket)]
            if self._updater.step(index, self.gradients.result(index), scale, part):
                works.append(self._publish(index))
            else:
                late.append(index)
        self._updater.finish()
        works += [self._publish(index) for index in late]
        for work in works:
            if work is not None:
                work.wait()
        self.gradients.reset()

    def _hold_frozen(self) -> None:
        """Have the updater leave frozen parameters alone, as plain torch does."""
        for bucket in self.buckets:
            idle = self.gradients.idle(bucket.index)
            if idle != self._held[bucket.index]:
                self._held[bucket.index] = idle
                own, places = self._owned(bucket), [bucket.places[index] for index in idle]
                self._updater.hold(bucket.index, [cut for p in places for cut in _parts(p, own)])

    def drop_gradients(self) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self.gradients.reset()

    def cancel_backward(self) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._hooks.listening = False
        self.gradients.abandon()
        for parameter in self._trained:
            set_raw_gradient(parameter, None)

    def close(self, *, give_back: bool = True) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._hooks.remove()
        for parameter in self._trained if give_back else ():
            parameter.data = parameter.data.clone()
        self._updater.close()
        self._comm.close()

    # -- for checkpoints and the census -----------------------------------------------------------

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        if not write:
            self._written.adopt()
        for bucket in self.buckets:
            held = self._owned(bucket)
            walked = held if write else bucket.shard(self._comm.rank)
            with self._updater.states(bucket.index, write=write) as states:
                for place, start, stop in places_within(bucket, walked):
                    cut = slice(start - held.start, stop - held.start)
                    yield Piece(
                        place.name,
                        place.parameter.shape,
                        start - place.start,
                        stop - place.start,
                        {kind: tensor[cut] for kind, tensor in states.items()},
                    )

    @property
    def traffic(self) -> Traffic:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return self._comm.traffic

    @property
    def share_factor(self) -> float | None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        factor = self.gradients.share_factor
        return None if factor is None else factor / self._replicas.count

    def settle_gradients(self) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self.gradients.settle()
        found = [self.gradients.averaged(bucket.index) for bucket in self.buckets]
        self._average_replicas([average for average in found if average is not None])

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        owned = [self._owned(bucket) for bucket in self.buckets]
        return gathered_pieces(self.gradients, self.buckets, owned, self._comm.rank, write=write)

    def resume_gradients(self, source: GradientSource) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        owned = [self._owned(bucket) for bucket in self.buckets]
        resume_gathered(self.gradients, self.buckets, owned, source)

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        kept = self._updater.other_states(scalars)
        if not self.shards_states and self._comm.rank > 0:
            return {}  # rank 0 has the same
        found: dict[str, Mapping[str, Any]] = {}
        if self._inputs.optimizer_factory.elementwise:
            for bucket in self.buckets:
                own = self._owned(bucket)
                items = [(p.name, part) for p in bucket.places for part in _parts(p, own)]
                numbers = self._updater.member_scalars(bucket.index)
                found |= uncommon_numbers(items, numbers, bucket.group_index, scalars)
        for index, members in self._whole_members():
            for place, states in zip(members, kept[index], strict=True):
                if states:
                    found[place.name] = states
        return found

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        if self._inputs.optimizer_factory.elementwise:
            for bucket in self.buckets:
                own = self._owned(bucket)
                for place in (p for p in bucket.places if p.name in states):
                    numbers = {f"group0.{name}": v for name, v in states[place.name].items()}
                    for part in _parts(place, own):
                        self._updater.set_member_scalars(bucket.index, part, numbers)
        for index, members in self._whole_members():
            for position, place in enumerate(members):
                if place.name in states:
                    self._updater.set_other_states(index, position, states[place.name])

    def _whole_members(self) -> Iterator[tuple[int, list[Place]]]:
        """For each bucket, the parameters that the optimizer has whole on this rank."""
        for bucket in () if self._inputs.optimizer_factory.elementwise else self.buckets:
            own = self._owned(bucket)
            yield bucket.index, [p for p in bucket.places if own.start <= p.start < own.stop]

    def scalars(self) -> dict[str, float]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return self._updater.scalars()

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._updater.set_scalars(scalars)

    def prepare_states(self) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._updater.prepare_states()

    def weights_changed(self) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._comm.fence()
        for bucket in self.buckets:
            part = self._weights[bucket.index].tensor[self._owned(bucket)]
            with self._updater.states(bucket.index, write=False) as states:
                if states["master"].data_ptr() != part.data_ptr():
                    part.copy_(states["master"])
            work = self._publish(bucket.index)
            if work is not None:
                work.wait()
        self._written.forget()
        self._comm.fence()

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """See :class:`~zerotrial.engine.protocols.Stage`: they are whole at all times."""
        del names
        return nullcontext()

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """See :class:`~zerotrial.engine.protocols.Stage`: nothing is sharded in the modules."""
        return {}

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        self._written.adopt()
        for bucket in self.buckets:
            whole = self._whole_master(bucket, dtype)
            for place in bucket.places:
                yield place.name, whole[place.start : place.stop].view(place.parameter.shape)

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        weights = [buffer.tensor for buffer in self._weights]
        frozen = [p for p in self._inputs.module.parameters() if p not in self._trained]
        parameters = [*weights, *frozen, *self.originals.tensors]
        kinds = {"parameters": parameters, **self.gradients.held()}
        known = {tensor.untyped_storage().data_ptr() for tensor in weights}
        for kind, tensors in self._updater.held().items():
            own = [t for t in tensors if t.untyped_storage().data_ptr() not in known]
            kinds[kind] = kinds.get(kind, []) + own
        return kinds

    # -- parts that differ between stages -------------------------------------------------------

    def _owned(self, bucket: Bucket) -> slice:
        """Elements of a bucket that this rank updates."""
        return bucket.shard(self._comm.rank) if self.shards_states else slice(0, bucket.numel)

    def _publish(self, index: int) -> Work | None:
        """Start giving the other ranks what this one updated."""
        return self._comm.all_gather(self._weights[index]) if self.shards_states else None

    def _build_gradients(self) -> Gradients:
        everywhere = not self.shards_states
        return WholeGradients(self.buckets, self._comm, self._handling(), everywhere=everywhere)

    def _handling(self, *, at_once: bool = False) -> Handling:
        """What the file says about gradients.

        Args:
            at_once: They travel as backward makes them; else as they have added up.
        """
        config, precision = self._inputs.config, self._inputs.precision
        accumulate = [precision.accumulate or bucket.dtype for bucket in self.buckets]
        waiting = [bucket.dtype for bucket in self.buckets] if at_once else accumulate
        return Handling(
            averaging=Averaging.of(
                self._inputs.mesh.data.size,
                operation=config.gradient_allreduce_op,
                prescale=config.prescale_gradients,
                predivide=config.gradient_predivide_factor,
            ).within(self._replicas.count),
            device=self._inputs.device,
            accumulate=accumulate,
            communicate=[precision.communicate or kind for kind in waiting],
            overlap=config.zero_optimization.overlap_comm is not False,
            refuse_unused=not config.zero_optimization.ignore_unused_parameters,
        )

    # -- construction ---------------------------------------------------------------------------

    def _bucket_numel(self) -> int:
        """Elements in a bucket, at most."""
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
            for index, members in self._whole_members():
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

    def _whole_master(self, bucket: Bucket, dtype: torch.dtype | None) -> Tensor:
        with self._updater.states(bucket.index, write=False) as states:
            own = states["master"]
            wide = dtype or own.dtype
            if not self.shards_states:
                return own.to(wide)
            buffer = self._comm.allocate(bucket.numel, wide, self._inputs.device)
            buffer.tensor[bucket.shard(self._comm.rank)].copy_(own)
        self._comm.all_gather(buffer).wait()
        return buffer.tensor


def _parts(place: Place, own: slice) -> list[slice]:
    """Return where the elements of a parameter lie in a rank's part of a bucket, if any do."""
    start, stop = max(place.start, own.start), min(place.stop, own.stop)
    return [slice(start - own.start, stop - own.start)] if start < stop else []


class Stage0(FlatStage):
    """Everything whole on every rank; gradients are all-reduced."""

    shards_states = False


class Stage1(FlatStage):
    """Optimizer states and master weights are sharded; gradients are reduced at the boundary."""

    shards_states = True


class Stage2(FlatStage):
    """Gradients are sharded too: reduced in every micro-batch, only the shard is kept."""

    shards_states = True

    def _build_gradients(self) -> Gradients:
        if self._comm.size == 1:  # the shard is the whole: nothing need travel through a buffer
            return super()._build_gradients()
        return ShardedGradients(self.buckets, self._comm, self._handling(at_once=True))
