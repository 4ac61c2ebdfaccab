"""Stage 3: parameters, gradients and optimizer states are sharded; blocks are gathered to compute.

``fully_shard`` gathers a unit before its forward and again before its backward, and
reduce-scatters its gradients after; see :mod:`zerotrial.engine.stage3.wrap` for the units. What is
ours: where the shards lie, the global norm, scaling and clipping, the same
:class:`~zerotrial.engine.protocols.Updater` as at the other stages, and the pieces of a checkpoint.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3.
    Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.comm.communicator import Communicator, Traffic, uses_nccl
from zerotrial.engine.comm.factory import connect
from zerotrial.engine.comm.replicas import Replicas
from zerotrial.engine.comm.timed_collectives import COMMUNICATION, timed_communicator
from zerotrial.engine.flat.gradients import Averaging, refuse_unused
from zerotrial.engine.memory.mapped_files import is_in_file, release
from zerotrial.engine.module.backward_detection import reaches_leaves
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.gradient_access import (
    GRADIENT_ALTERNATIVES,
    get_raw_gradient,
    set_raw_gradient,
)
from zerotrial.engine.module.gradient_hooks import GradientHooks
from zerotrial.engine.module.replicated_parameters import ReplicatedParameters
from zerotrial.engine.protocols import GradientSource, Piece, Updater, UpdaterInputs
from zerotrial.engine.stage3.alone import gather_when_alone
from zerotrial.engine.stage3.gather import kept_whole
from zerotrial.engine.stage3.give_back import give_back as make_plain
from zerotrial.engine.stage3.internals import (
    UnitParameters,
    local_part,
    parameters_of,
    set_divide_factor,
    sum_only,
)
from zerotrial.engine.stage3.layout import FlatBucket, Layout, Shard, lay_out, whole_parameter
from zerotrial.engine.stage3.mesh import open_mesh
from zerotrial.engine.stage3.order import ReductionOrder
from zerotrial.engine.stage3.paged import PagedGradients, open_files, page_units
from zerotrial.engine.stage3.reduce import Plugged, plug_in
from zerotrial.engine.stage3.update import ShardUpdate, Update, WholeUpdate
from zerotrial.engine.stage3.wrap import shard_module, start, start_over
from zerotrial.engine.update.in_memory import build_updater
from zerotrial.engine.update.norm import squared_norm

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.memory.mapped_files import FileMemory
    from zerotrial.engine.protocols import StageInputs


class Stage3:
    """The :class:`~zerotrial.engine.protocols.Stage` on ``fully_shard``.

    Args:
        inputs: What every stage is built from; the module is sharded already.
        units: In the order of :func:`~zerotrial.engine.stage3.wrap.shard_module`.
        layout: Where this rank's shards lie.
        update: Turns gradients into new weights.
        comm: Between the ranks that states are sharded over.
        plugged: Our collectives, where ``fully_shard`` uses them.
        originals: Of the frozen parameters.
        leave: Called when the stage is closed.
        files: Where shards and gradients lie, if they are in files.
    """

    gathers = True

    def __init__(  # noqa: PLR0917 - as above
        self,
        inputs: StageInputs,
        units: Sequence[FSDPModule],
        layout: Layout,
        update: Update,
        comm: Communicator,
        plugged: Plugged | None,
        leave: Callable[[], None],
        originals: FrozenOriginals,
        files: FileMemory | None = None,
    ) -> None:
        self.optimizer = update.updater.optimizer
        self._module = inputs.module
        self._units = units
        found = filter(None, map(parameters_of, units))
        self._reduced = [unit for unit in found if unit.trained]
        self.originals = originals
        self._hooks = GradientHooks()
        for unit in self._reduced:
            unit.after_gather(self._hooks.connect)
        self._layout = layout
        self._shards = layout.shards
        self._shards_in = layout.shards_in
        self._buckets = layout.buckets
        self._update = update
        self._replicated = ReplicatedParameters(
            layout.replicated,
            {shard.parameter: shard.name for shard in layout.shards},  # type: ignore[misc]
            partial(update.pieces, write=True),
        )
        self._versions = self._read_versions()
        self._written = False  # user code has written to a shard of some rank
        self._frozen = [p for p in inputs.module.parameters() if not p.requires_grad]
        self._comm = comm
        self._replicas = Replicas(inputs.mesh.replicate, comm.traffic, inputs.observer)
        self._plugged = plugged
        self._observer = inputs.observer
        self._leave: Callable[[], None] | None = leave
        self._mesh = inputs.mesh
        self._ownership = inputs.ownership
        self._counted = layout.counted()
        self._device = inputs.device
        self._order = ReductionOrder(units)
        self._share = 1.0  # what the gradients of the pass under way are multiplied by
        self._idle: frozenset[str] | None = None
        """Parameters that were frozen in all passes since the last step; None: no pass yet."""
        self._held: frozenset[str] = frozenset()
        """Parameters that the last step has left alone."""
        self._torn = False  # inside a backward pass, or after one that raised
        self._dropped: set[str] = set()
        """Parameters whose gradient user code has removed since the last backward pass."""
        self._owned: dict[Tensor, Shard] | None = None
        """Sharded and gathered parameters; looked up at most once after each backward pass."""
        self._paged: PagedGradients | None = None
        if files is not None:
            page_units(units)
            owners = [b.unit for b in layout.buckets if isinstance(b, FlatBucket)]
            self._paged = PagedGradients(layout.buckets, files, owners, self._settle)
        self._kept: list[Tensor | None] = [None] * len(layout.buckets)
        self._every_gradient = not inputs.config.zero_optimization.ignore_unused_parameters

    def _read_versions(self) -> list[int]:
        """Count the writes to each shard, where masters of their own must hear of them."""
        shards = self._shards if self._update.masters_apart else ()
        return [shard.parameter._version for shard in shards]  # noqa: SLF001 - as WeightWrites

    def _adopt_written(self) -> None:
        """Take what user code has written to shards into the masters. **Collective**."""
        if self._written:
            self._update.update_masters()
        self._written = False
        self._versions = self._read_versions()

    def leaves(self) -> Iterator[Tensor]:
        """See :class:`~zerotrial.engine.protocols.Stage`: the gathered parameters."""
        for unit in self._reduced:
            for member in unit.trained:
                yield from member.gathered_once()
        yield from self._replicated.parameters

    def on_unexpected_gradient(self, begin: Callable[[], None]) -> None:
        """See :class:`~zerotrial.engine.protocols.Stage`."""

        def look(unit: UnitParameters) -> None:
            # On another rank the pass may have come to this unit: the sums must go together.
            if not self._torn and (unit.has_gradients or reaches_leaves(self.leaves())):
                begin()

        for unit in self._reduced:
            unit.before_reduction(partial(look, unit))

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """Drop gradients that are not this engine's: of another's loss that came through here."""
        self._share = share
        if self._plugged is not None:
            self._plugged.begin_backward()
        for shard in self._shards:
            set_raw_gradient(shard.parameter, None)
        self._torn = True
        self._owned = None
        if self._paged is not None:
            self._paged.reached.clear()
            self._paged.listening, self._paged.share = True, share

    def after_backward(self, *, boundary: bool) -> None:
        """Add up this micro-batch's gradients, which came averaged over the ranks."""
        for unit in self._reduced:  # it came back to one where outputs that were not seen led on
            unit.reduce_rest()
        if self._plugged is not None:
            self._plugged.reductions.finish()
        self._torn = False
        if self._paged is not None:
            self._paged.take_replicated()
            self._paged.listening = False
        frozen = frozenset(s.name for s in self._shards if not s.parameter.requires_grad)
        self._idle = frozen if self._idle is None else self._idle & frozen
        if self._dropped:
            own = (shard for shard in self._shards if shard.name in self._dropped)
            self._dropped -= {shard.name for shard in own if self._has_gradient(shard)}
        if boundary and self._every_gradient:
            trained = (s for s in self._shards if s.name not in frozen)
            refuse_unused([s.name for s in trained if not self._has_gradient(s)])
        if self._paged is None:
            self._add_up()
        if self._plugged is not None:
            self._plugged.end_backward()

    def _settle(self) -> None:
        if self._plugged is not None:
            self._plugged.reductions.finish()

    @property
    def _gradients(self) -> list[Tensor | None]:
        """For each bucket what was gathered, laid out like its master."""
        return self._kept if self._paged is None else self._paged.kept

    def _forget(self) -> None:
        self._idle, self._dropped = None, set()
        self._kept = [None] * len(self._buckets)
        if self._paged is not None:
            self._paged.forget()

    def _add_up(self) -> None:
        fresh = self._fresh_parts()
        for index, bucket in enumerate(self._buckets):
            kept = self._gradients[index]
            new = bucket.take_gradient() if fresh[index] is None else fresh[index]
            if new is not None and self._share != 1.0:
                new.mul_(self._share)
            if kept is None:
                self._gradients[index] = new
            elif new is not None:
                kept.add_(new)

    def _fresh_parts(self) -> list[Tensor | None]:
        """For each bucket what backward has made, where it does not hang on the parameters."""
        if self._plugged is None:
            return [None] * len(self._buckets)
        return self._plugged.cut([bucket.master.numel() for bucket in self._buckets])

    def _has_gradient(self, shard: Shard) -> bool:
        found = self._plugged is not None and self._plugged.has_reached(shard.parameter)
        if self._paged is not None:
            found = shard.parameter in self._paged.reached
        return found or get_raw_gradient(shard.parameter) is not None

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Return the norm; the shards were averaged in backward, replicas are. **Collective**."""
        self._average_replicas()
        written = self._read_versions() != self._versions
        # Where the gradients are: on a GPU nothing is waited for until all is summed.
        sums = torch.zeros(4, dtype=torch.float64, device=self._buckets[0].master.device)
        for index, gradient in enumerate(self._gradients):
            if gradient is not None:
                for span in self._counted[index]:
                    sums[0].add_(squared_norm(gradient[span]))
                release(gradient)
        for place, number in enumerate((written, *self._order.take()), start=1):
            sums[place].fill_(number)
        sums = self._comm.sum(sums.to(self._device))
        with self._observer.phase(COMMUNICATION):
            self._mesh.add_over_model(sums[:1])
        squares, changed, *order = sums.tolist()
        self._written = changed > 0
        self._order.check(order, self._comm.size)
        return math.sqrt(squares) / loss_scale

    def apply(self, scale: float) -> None:
        """Update this rank's shards; the next gather publishes them. **Collective**."""
        gradients, idle = self._gradients, (self._idle or frozenset()) | self._dropped
        self._forget()
        if idle != self._held:
            self._held = idle
            self._update.freeze(idle)
        self._adopt_written()
        self._replicated.update_masters()
        self._update.apply(gradients, scale)
        self._replicated.publish()
        self._release()
        # All ranks have summed the norm since they last read weights: no one reads now.
        if self._plugged is not None:
            self._plugged.publish()

    def drop_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        self._order.take()
        self._forget()

    def cancel_backward(self) -> None:
        """Forget all gradients, a torn backward's too. **Collective** if some were sent."""
        if self._plugged is not None:
            self._plugged.reductions.finish()
            self._plugged.end_backward()
        if self._torn:
            start_over(self._units)
        self._torn = False
        if self._paged is not None:
            self._paged.listening = False
        for shard in self._shards:
            set_raw_gradient(shard.parameter, None)
        self.drop_gradients()

    @property
    def traffic(self) -> Traffic:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return self._comm.traffic

    share_factor: float | None = None
    """See :class:`~zerotrial.engine.protocols.Stage`: every backward averages."""

    gathers_gradients = False
    """See :class:`~zerotrial.engine.protocols.Stage`."""

    gradients_readable = False
    """See :class:`~zerotrial.engine.protocols.Stage`."""

    def owns_gradient(self, parameter: Tensor) -> bool:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return parameter in self._places

    @property
    def _places(self) -> dict[Tensor, Shard]:
        if self._owned is None:
            self._owned = {shard.parameter: shard for shard in self._shards}
            members = [member for unit in self._reduced for member in unit.trained]
            for member in members:
                for whole in member.gathered_once():
                    self._owned[whole] = self._owned[member.sharded]
        return self._owned

    def read_gradient(self, parameter: Tensor) -> NoReturn:
        """Refuse; see :class:`~zerotrial.engine.protocols.Stage`."""
        del parameter
        raise EngineError(
            f"p.grad: at stage 3 each rank keeps a part of the gradient; "
            f"{GRADIENT_ALTERNATIVES}; discard gradients with engine.zero_grad()"
        )

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Remove a gradient, refuse another; see :class:`~zerotrial.engine.protocols.Stage`."""
        if value is not None:
            self.read_gradient(parameter)
        shard = self._places[parameter]
        gradient = self._gradients[shard.bucket]
        if gradient is not None:
            gradient[shard.span].zero_()
            release(gradient)
        self._dropped.add(shard.name)

    def settle_gradients(self) -> None:
        """Average over replicas what each has gathered; that over shards outlasts no backward."""
        if any(gradient is not None for gradient in self._gradients):
            self._average_replicas()

    def _average_replicas(self) -> None:
        """Average over the ranks that have the same shards. **Collective** if there are any."""
        if self._replicas.count == 1:
            return
        for index, gradient in enumerate(self._gradients):
            # Replicas may have reached different units: zeros stand for what one has not.
            whole = self._room(index).zero_() if gradient is None else gradient
            self._replicas.average([whole])
            self._gradients[index] = whole
            release(whole)

    def _room(self, index: int) -> Tensor:
        """Memory for a bucket's gradient, of any value."""
        if self._paged is not None:
            return self._paged.homes[index]
        return torch.empty_like(self._buckets[index].master)

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk this rank's rows of the gradients gathered so far."""
        del write  # a rank has its rows and no others
        if all(gradient is None for gradient in self._gradients):
            return
        for index, (bucket, found) in enumerate(zip(self._buckets, self._gradients, strict=True)):
            # A rank may have none where another has some: zeros, so that none are missing.
            gradient = torch.zeros_like(bucket.master) if found is None else found
            for shard in self._rows_in(index):
                values = {"gradient": gradient[shard.span]}
                yield Piece(shard.name, shard.parameter.shape, shard.start, shard.stop, values)
            release(gradient)

    def resume_gradients(self, source: GradientSource) -> None:
        """Go on with the gradients of a checkpoint."""
        if not source.has_averages:
            return
        for index in range(len(self._buckets)):
            gradient = self._room(index).zero_()
            for shard in self._rows_in(index):
                source.read_average(shard.name, shard.start, gradient[shard.span])
            self._gradients[index] = gradient
            release(gradient)

    def _rows_in(self, index: int) -> list[Shard]:
        return [shard for shard in self._shards_in[index] if shard.start < shard.stop]

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk the ranges whose optimizer states this rank keeps."""
        if not write:
            if self._update.masters_apart:
                written = self._read_versions() != self._versions
                flag = torch.tensor([written], dtype=torch.float64, device=self._device)
                self._written = float(self._comm.sum(flag)) > 0
                self._adopt_written()
            self._replicated.update_masters()
        return self._update.pieces(write=write)

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """Optimizer states that do not go by element, of parameters that are whole on this rank."""
        kept = self._update.updater.other_states(scalars)
        return self._update.uncommon_numbers(scalars) | {
            name: states
            for names, bucket in zip(self._update.whole_names, kept, strict=False)
            for name, states in zip(names, bucket, strict=True)
            if states
        }

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what :meth:`other_states` gave."""
        self._update.set_numbers(states)
        for index, names in enumerate(self._update.whole_names):
            for place, name in enumerate(names):
                if name in states:
                    self._update.updater.set_other_states(index, place, states[name])

    def scalars(self) -> dict[str, float]:
        """Optimizer scalars that are the same on all ranks."""
        return self._update.updater.scalars()

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore what :meth:`scalars` gave."""
        self._update.updater.set_scalars(scalars)

    def prepare_states(self) -> None:
        """Make the optimizer's states, so that a load can fill them."""
        self._update.updater.prepare_states()

    def weights_changed(self) -> None:
        """Publish loaded masters. **Collective**."""
        self._comm.fence()
        self._update.publish()
        self._replicated.publish()
        self._versions = self._read_versions()
        self._release()
        if self._plugged is not None:
            self._plugged.publish()

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Tensors by kind; the shards are the master weights."""
        states = self._update.updater.tensors_by_kind()
        masters = [*(bucket.master for bucket in self._buckets), *states.get("master", [])]
        found = {
            "parameters": [*self._frozen, *self.originals.tensors],
            "master": masters,
            "gradients": [gradient for gradient in self._gradients if gradient is not None],
            "optimizer": states.get("optimizer", []),
            "buckets": [] if self._plugged is None else self._plugged.tensors,
        }
        return {k: [t for t in found[k] if not is_in_file(_own_part(t))] for k in found}

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return kept_whole(self._units, names)

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        found = filter(None, map(parameters_of, self._units))
        members = {member.sharded: member for unit in found for member in unit.members}
        return {
            part: {
                name: members[parameter].write_full  # type: ignore[index]
                for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
                if parameter in members
            }
            for part in self._module.modules()
        }

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter, whole, one after the other. **Collective**."""
        replicated = self._replicated.full_weights()
        for shard in self._shards:
            if shard.name in replicated:
                whole = replicated[shard.name]
            else:
                whole = whole_parameter(shard, self._comm, self._device)
            yield shard.name, whole if dtype is None else whole.to(dtype)

    def close(self, *, give_back: bool = True) -> None:
        """Give memory shared with other ranks, files and threads back."""
        if give_back:
            if self._torn:
                self.cancel_backward()
            self._release()
            make_plain(
                self._units, self._layout, self._comm, self._device, self._ownership, self._hooks
            )
        self._update.updater.close()
        self._comm.close()
        if self._leave is not None:
            self._leave()
        self._leave = None

    def _release(self) -> None:
        """Free gathered weights, which a forward without a backward leaves behind in the root."""
        for unit in self._units:
            unit.reshard()


def _own_part(tensor: Tensor) -> Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def build_stage3(inputs: StageInputs) -> Stage3:
    """Shard the model and build its stage. **Collective**.

    Args:
        inputs: The model and everything else; the module is sharded in place.

    Returns:
        The stage.
    """
    comm = timed_communicator(connect(inputs.mesh.shard.group, inputs.device), inputs.observer)
    files = open_files(inputs)
    mesh, leave = open_mesh(inputs)
    units: list[FSDPModule] = []
    layout: Layout | None = None
    try:
        originals = FrozenOriginals(comm, inputs.device, files)
        units = shard_module(inputs, comm, mesh, files, originals)
        layout = lay_out(inputs, units, comm, files, factor=_averaging_factor(inputs))
        start(inputs.module)
        plugged = _plug_in(inputs, units, comm)
        gather_when_alone(units, None if plugged is None else plugged.refresh)
        kind = ShardUpdate if inputs.optimizer_factory.elementwise else WholeUpdate
        update = kind(inputs, layout, comm, _updater_factory(inputs))
    except ConfigError:  # the user's mistake, found on every rank: the model is to be of use still
        if layout is not None:
            make_plain(units, layout, comm, inputs.device, inputs.ownership, GradientHooks())
        comm.close()
        leave()
        raise
    return Stage3(inputs, units, layout, update, comm, plugged, leave, originals, files)


def _plug_in(
    inputs: StageInputs, units: Sequence[FSDPModule], comm: Communicator
) -> Plugged | None:
    """Put our collectives in the place of those that ``fully_shard`` has, on CPU."""
    config, replicas = inputs.config, inputs.mesh.replicate.size
    if comm.size > 1 and inputs.device.type == "cpu":
        kind = inputs.precision.communicate or inputs.precision.accumulate
        return plug_in(
            units,
            comm,
            inputs.device,
            factor=_averaging_factor(inputs),
            dtype=kind,
            observer=inputs.observer,
            apart=config.zero_optimization.offload_param.device == "nvme",
        )
    group = inputs.mesh.shard.group
    if group is not None and not uses_nccl(group, inputs.device):
        for unit in units:  # only NCCL takes the mean
            sum_only(unit)
    if config.gradient_allreduce_op == "sum":
        for unit in units:
            set_divide_factor(unit, 1.0 / replicas)
    return None


def _averaging_factor(inputs: StageInputs) -> float:
    """Return what the sum of the gradients over the shards' ranks is multiplied by."""
    config = inputs.config
    averaging = Averaging.of(
        inputs.mesh.data.size,
        operation=config.gradient_allreduce_op,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
    ).within(inputs.mesh.replicate.size)
    return averaging.before * averaging.after


def _updater_factory(inputs: StageInputs) -> Callable[[UpdaterInputs], Updater]:
    """Choose where optimizer states live; the import costs, and is seldom needed."""
    zero = inputs.config.zero_optimization
    offload, on_host = zero.offload_optimizer.device, zero.offload_param.device != "none"
    if offload == "nvme" or (offload == "cpu" and not on_host):
        from zerotrial.engine.update import offload as elsewhere

        return elsewhere.build_updater
    return build_updater
