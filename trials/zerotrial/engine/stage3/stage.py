"""Stage 3: parameters, gradients and optimizer states are sharded; blocks are gathered to compute.

``fully_shard`` gathers a unit before its forward and again before its backward, and then
reduce-scatters its gradients; see :mod:`zerotrial.engine.stage3.sharding` for the units. This
package adds the memory layout, the global norm, scaling and clipping, the
:class:`~zerotrial.engine.protocols.Updater` of the other stages, and the pieces of a checkpoint.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3.
    Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.comm.communicator import Communicator, Traffic, uses_nccl
from zerotrial.engine.comm.factory import connect
from zerotrial.engine.comm.replicas import Replicas
from zerotrial.engine.flat.gradients import Averaging, raise_if_unused
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.full_tensor import is_sharded
from zerotrial.engine.module.gradient_access import (
    GRADIENT_ALTERNATIVES,
    get_raw_gradient,
    reaches_leaves,
    set_raw_gradient,
)
from zerotrial.engine.module.gradient_hooks import GradientHooks
from zerotrial.engine.module.replicated_parameters import ReplicatedParameters
from zerotrial.engine.protocols import (
    COMMUNICATION,
    ENGINE_PARTS,
    GradientSource,
    Piece,
    Updater,
    UpdaterInputs,
)
from zerotrial.engine.stage3.internals import (
    UnitParameters,
    local_part,
    parameters_of,
)
from zerotrial.engine.stage3.layout import Layout, Shard, gather_parameter, lay_out, unshard_model
from zerotrial.engine.stage3.mesh import open_mesh
from zerotrial.engine.stage3.outside_reads import OutsideReads
from zerotrial.engine.stage3.prefetch import keep_gathered
from zerotrial.engine.stage3.reduce import CustomCollectives, install_collectives
from zerotrial.engine.stage3.reduction_order import ReductionOrder
from zerotrial.engine.stage3.sharding import initialize_root, reset_units, shard_module
from zerotrial.engine.stage3.standalone_call import gather_for_standalone_calls
from zerotrial.engine.stage3.update import FullParameterUpdate, ShardUpdate, Update
from zerotrial.engine.update.in_memory import build_offloaded, build_updater
from zerotrial.engine.update.norm import squared_norm

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.protocols import StageInputs


class Stage3:
    """The :class:`~zerotrial.engine.protocols.Stage` built on ``fully_shard``.

    Args:
        inputs: Inputs of every stage; the module is already sharded.
        units: Units in the order of :func:`~zerotrial.engine.stage3.sharding.shard_module`.
        layout: Locations of this rank's shards.
        update: Computes new weights from gradients.
        comm: Communicator of the ranks that shard states.
        collectives: Installed collectives, if ``fully_shard`` uses them.
        close_mesh: Called when the stage is closed.
        originals: Original values of frozen parameters.
        reads: Gathers weights that are read outside of their modules.
    """

    gathers = True

    def __init__(  # noqa: PLR0917 - as above
        self,
        inputs: StageInputs,
        units: Sequence[FSDPModule],
        layout: Layout,
        update: Update,
        comm: Communicator,
        collectives: CustomCollectives | None,
        close_mesh: Callable[[], None],
        originals: FrozenOriginals,
        reads: OutsideReads,
    ) -> None:
        self.updater = update.updater
        self.optimizer = self.updater.optimizer
        self._module = inputs.module
        self._units = units
        parameters = filter(None, map(parameters_of, units))
        self._reduced = [unit for unit in parameters if unit.trained]
        self.originals = originals
        self._reads = reads
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
        )
        self._gradient_listeners: list[Any] = []
        """Handles of the hooks of replicated parameters."""
        self._whole_names = {n for n, p in inputs.module.named_parameters() if not is_sharded(p)}
        self._versions = self._read_versions()
        self._written = False  # whether user code has written to a shard on any rank
        self._frozen = [p for p in inputs.module.parameters() if not p.requires_grad]
        self._comm = comm
        self._replicas = Replicas(inputs.mesh.replicate, comm.traffic, inputs.observer)
        self._collectives = collectives
        self._observer = inputs.observer
        self._close_mesh: Callable[[], None] | None = close_mesh
        self._mesh = inputs.mesh
        self._ownership = inputs.ownership
        self._counted = layout.counted()
        self._device = inputs.device
        self._order = ReductionOrder(units)
        self._share = 1.0  # factor of the current pass's gradients
        self._frozen_since_step: frozenset[str] | None = None
        """Parameters frozen in all passes since the last step; None before the first pass."""
        self._frozen_names: frozenset[str] = frozenset()
        """Parameters that the last step did not update."""
        self._in_backward = False  # during a backward pass, and after one that raised
        self._dropped: set[str] = set()
        """Parameters whose gradients user code has removed since the last backward pass."""
        self._owned: dict[Tensor, Shard] | None = None
        """Sharded and gathered parameters, looked up at most once per backward pass."""
        self._memory = inputs.memory
        self._file_gradients = inputs.memory.keep_gradients(
            units, layout.buckets, self._wait_for_reductions
        )
        self._kept: list[Tensor | None] = [None] * len(layout.buckets)
        self._every_gradient = not inputs.config.zero_optimization.ignore_unused_parameters

    def _read_versions(self) -> list[int]:
        """Return the write counters of the shards, if the updater has separate masters."""
        shards = self._shards if self._update.separate_masters else ()
        return [shard.parameter._version for shard in shards]  # noqa: SLF001 - as WeightWrites

    def _has_written(self) -> bool:
        """Whether user code has written to weights whose masters are apart."""
        written = self._replicated.adopt() and self._update.separate_masters
        return written or self._read_versions() != self._versions

    def _copy_written_to_masters(self) -> None:
        """Copy values that user code wrote to shards into the masters. **Collective**."""
        if self._written:
            self._update.update_masters()
        self._written = self._replicated.written = False
        self._versions = self._read_versions()

    def leaves(self) -> Iterator[Tensor]:
        """Yield the gathered parameters."""
        for unit in self._reduced:
            for member in unit.trained:
                yield from member.gathered_if_any()
        yield from self._replicated.parameters

    def on_unexpected_gradient(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` when a gradient comes outside of a pass, before it is reduced or added."""

        def look(unit: UnitParameters) -> None:
            # Another rank may be reducing this unit inside its pass: reductions must match.
            if not self._in_backward and (unit.has_gradients or reaches_leaves(self.leaves())):
                begin()

        for unit in self._reduced:
            unit.before_reduction(partial(look, unit))
        stage_ref = weakref.ref(self)  # the model may outlive the engine

        def on_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
            del gradient
            stage = stage_ref()
            outside = stage is not None and not stage._in_backward  # noqa: SLF001 - own class
            if outside and reaches_leaves([parameter]):
                begin()

        for parameter in self._replicated.parameters:
            if parameter.requires_grad:
                register: Any = parameter.register_hook
                self._gradient_listeners.append(register(partial(on_gradient, parameter)))

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """Discard gradients that backward passes outside of this engine left behind."""
        self._share = share
        if self._collectives is not None:
            self._collectives.begin_backward()
        for shard in self._shards:
            set_raw_gradient(shard.parameter, None)
        self._in_backward = True
        self._owned = None
        self._reads.before_backward()
        if self._file_gradients is not None:
            self._file_gradients.reached.clear()
            self._file_gradients.listening, self._file_gradients.share = True, share

    def after_backward(self, *, boundary: bool) -> None:
        """Accumulate the gradients of this micro-batch, which are averaged over the ranks."""
        for unit in self._reduced:  # gradients that came after their unit's reduction
            unit.reduce_remaining()
        self._reads.after_backward()
        if self._collectives is not None:
            self._collectives.reductions.finish()
        self._in_backward = False
        if self._file_gradients is not None:
            self._file_gradients.take_replicated()
            self._file_gradients.listening = False
        frozen = frozenset(s.name for s in self._shards if not s.parameter.requires_grad)
        self._frozen_since_step = (
            frozen if self._frozen_since_step is None else self._frozen_since_step & frozen
        )
        if self._dropped:
            restored = (shard for shard in self._shards if shard.name in self._dropped)
            self._dropped -= {shard.name for shard in restored if self._has_gradient(shard)}
        if boundary and self._every_gradient:
            trained = (s for s in self._shards if s.name not in frozen)
            raise_if_unused([s.name for s in trained if not self._has_gradient(s)])
        if self._file_gradients is None:
            self._accumulate()
        if self._collectives is not None:
            self._collectives.end_backward()

    def _wait_for_reductions(self) -> None:
        if self._collectives is not None:
            self._collectives.reductions.finish()

    @property
    def _gradients(self) -> list[Tensor | None]:
        """Accumulated gradient of each bucket, in the layout of its master."""
        if self._file_gradients is None:
            return self._kept
        return self._file_gradients.kept  # type: ignore[no-any-return]

    def _forget(self) -> None:
        self._frozen_since_step, self._dropped = None, set()
        self._kept = [None] * len(self._buckets)
        if self._file_gradients is not None:
            self._file_gradients.forget()

    def _accumulate(self) -> None:
        fresh = self._new_gradients()
        for index, bucket in enumerate(self._buckets):
            total = self._gradients[index]
            new = bucket.take_gradient() if fresh[index] is None else fresh[index]
            if new is not None and self._share != 1.0:
                new.mul_(self._share)
            if total is None:
                self._gradients[index] = new
            elif new is not None:
                total.add_(new)

    def _new_gradients(self) -> list[Tensor | None]:
        """Return the new gradients of each bucket that bypass the parameters' ``grad``."""
        if self._collectives is None:
            return [None] * len(self._buckets)
        return self._collectives.cut([bucket.master.numel() for bucket in self._buckets])

    def _has_gradient(self, shard: Shard) -> bool:
        arrived = self._collectives is not None and self._collectives.has_reached(shard.parameter)
        if self._file_gradients is not None:
            arrived = shard.parameter in self._file_gradients.reached
        return arrived or get_raw_gradient(shard.parameter) is not None

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Average over replicas and return the norm. **Collective**."""
        self._average_replicas()
        written = self._has_written()
        # Where the gradients are: on a GPU nothing is waited for until all is summed.
        sums = torch.zeros(4, dtype=torch.float64, device=self._buckets[0].master.device)
        for index, gradient in enumerate(self._gradients):
            if gradient is not None:
                for span in self._counted[index]:
                    sums[0].add_(squared_norm(gradient[span]))
                self._memory.release(gradient)
        for position, number in enumerate((written, *self._order.take()), start=1):
            sums[position].fill_(number)
        sums = self._comm.sum(sums.to(self._device))
        with self._observer.phase(COMMUNICATION):
            self._mesh.add_over_model(sums[:1])
        squares, written_anywhere, *order = sums.tolist()
        self._written = written_anywhere > 0
        self._order.check(order, self._comm.size)
        return math.sqrt(squares) / loss_scale

    def apply(self, scale: float) -> None:
        """Update this rank's shards, which the next gather distributes. **Collective**."""
        gradients, idle = self._gradients, (self._frozen_since_step or frozenset()) | self._dropped
        self._forget()
        if idle != self._frozen_names:
            self._frozen_names = idle
            self._update.freeze(idle)
        self._copy_written_to_masters()
        self._update.apply(gradients, scale)
        self._replicated.publish()
        self._release()
        # All ranks have reduced the norm since they last read weights, so none reads them now.
        if self._collectives is not None:
            self._collectives.publish()

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients."""
        self._order.take()
        self._forget()

    def cancel_backward(self) -> None:
        """Discard all gradients, including an interrupted backward's. **Collective** if any."""
        if self._collectives is not None:
            self._collectives.reductions.finish()
            self._collectives.end_backward()
        if self._in_backward:
            reset_units(self._units)
        self._in_backward = False
        if self._file_gradients is not None:
            self._file_gradients.listening = False
        for shard in self._shards:
            set_raw_gradient(shard.parameter, None)
        self.drop_gradients()

    @property
    def traffic(self) -> Traffic:
        """Traffic of the communicator."""
        return self._comm.traffic

    local_to_average: float | None = None
    """None: every backward averages gradients."""

    gathers_gradients = False
    """See :class:`~zerotrial.engine.protocols.Stage`."""

    gradients_readable = False
    """See :class:`~zerotrial.engine.protocols.Stage`."""

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Whether the stage manages a parameter's gradient."""
        return parameter in self._shard_of

    @property
    def _shard_of(self) -> dict[Tensor, Shard]:
        if self._owned is None:
            self._owned = {shard.parameter: shard for shard in self._shards}
            members = [member for unit in self._reduced for member in unit.trained]
            for member in members:
                for gathered in member.gathered_if_any():
                    self._owned[gathered] = self._owned[member.sharded]
        return self._owned

    def read_gradient(self, parameter: Tensor) -> NoReturn:
        """Raise an error: no rank has the full gradient."""
        del parameter
        raise EngineError(
            f"p.grad: at stage 3 each rank keeps a part of the gradient; "
            f"{GRADIENT_ALTERNATIVES}; discard gradients with engine.zero_grad()"
        )

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Discard a parameter's gradient; refuse any other value."""
        if value is not None:
            self.read_gradient(parameter)
        shard = self._shard_of[parameter]
        gradient = self._gradients[shard.bucket]
        if gradient is not None:
            gradient[shard.span].zero_()
            self._memory.release(gradient)
        self._dropped.add(shard.name)

    def settle_gradients(self) -> None:
        """Average accumulated gradients over replicas; averages over shards are complete."""
        if any(gradient is not None for gradient in self._gradients):
            self._average_replicas()

    def _average_replicas(self) -> None:
        """Average gradients over the ranks with the same shards. **Collective** if several."""
        if self._replicas.count == 1:
            return
        for index, gradient in enumerate(self._gradients):
            # Replicas may have reached different units: missing gradients count as zeros.
            average = self._gradient_memory(index).zero_() if gradient is None else gradient
            self._replicas.average([average])
            self._gradients[index] = average
            self._memory.release(average)

    def _gradient_memory(self, index: int) -> Tensor:
        """Return uninitialized memory for a bucket's gradient."""
        if self._file_gradients is not None:
            return self._file_gradients.homes[index]  # type: ignore[no-any-return]
        return torch.empty_like(self._buckets[index].master)

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Yield this rank's rows of the accumulated gradients."""
        del write  # a rank never reads rows of others
        if all(gradient is None for gradient in self._gradients):
            return
        for index, (bucket, total) in enumerate(zip(self._buckets, self._gradients, strict=True)):
            # Other ranks may have this gradient: write zeros, so that no rows are missing.
            gradient = torch.zeros_like(bucket.master) if total is None else total
            for shard in self._rows_in(index):
                values = {"gradient": gradient[shard.span]}
                yield Piece(shard.name, shard.parameter.shape, shard.start, shard.stop, values)
            self._memory.release(gradient)

    def resume_gradients(self, source: GradientSource) -> None:
        """Restore the accumulated gradients of a checkpoint."""
        if not source.has_averages:
            return
        for index in range(len(self._buckets)):
            gradient = self._gradient_memory(index).zero_()
            for shard in self._rows_in(index):
                source.read_average(shard.name, shard.start, gradient[shard.span])
            self._gradients[index] = gradient
            self._memory.release(gradient)

    def _rows_in(self, index: int) -> list[Shard]:
        return [shard for shard in self._shards_in[index] if shard.start < shard.stop]

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Yield the ranges whose optimizer states this rank has."""
        if not write:
            written = self._has_written()
            if self._update.separate_masters:
                flag = torch.tensor([written], dtype=torch.float64, device=self._device)
                self._written = float(self._comm.sum(flag)) > 0
                self._copy_written_to_masters()
        return self._update.pieces(write=write)

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """Return non-elementwise optimizer states of full parameters on this rank."""
        by_bucket = self.updater.other_states(scalars)
        return self._update.uncommon_numbers(scalars) | {
            name: states
            for names, bucket in zip(self._update.full_names, by_bucket, strict=False)
            for name, states in zip(names, bucket, strict=True)
            if states
        }

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the result of :meth:`other_states`."""
        self._update.set_numbers(states)
        for index, names in enumerate(self._update.full_names):
            for position, name in enumerate(names):
                if name in states:
                    self.updater.set_other_states(index, position, states[name])

    def weights_changed(self) -> None:
        """Publish loaded masters. **Collective**."""
        self._comm.fence()
        self._update.publish()
        self._replicated.publish()
        self._versions = self._read_versions()
        self._release()
        if self._collectives is not None:
            self._collectives.publish()

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors by kind; the shards are the master weights."""
        states = self.updater.tensors_by_kind()
        masters = [*(bucket.master for bucket in self._buckets), *states.get("master", [])]
        by_kind = {
            "parameters": [
                *(*self._frozen, *self.originals.tensors),
                *self._replicated.parameters,
            ],
            "master": masters,
            "gradients": [gradient for gradient in self._gradients if gradient is not None],
            "optimizer": states.get("optimizer", []),
            "buckets": [
                *([] if self._collectives is None else self._collectives.tensors),
                *self._replicated.buffers,
            ],
        }
        in_file = self._memory.contains
        return {k: [t for t in by_kind[k] if not in_file(_local_part(t))] for k in by_kind}

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        return keep_gathered(self._units, names - self._whole_names)

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """See :class:`~zerotrial.engine.protocols.Stage`."""
        unit_parameters = filter(None, map(parameters_of, self._units))
        writers: dict[Any, Callable[[Tensor], None]] = {
            member.sharded: member.write_full for unit in unit_parameters for member in unit.members
        }
        writers |= self._replicated.writers()
        return {
            part: {
                name: writers[parameter]
                for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
                if parameter in writers
            }
            for part in self._module.modules()
        }

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the trainable parameters in full, one after the other. **Collective**."""
        replicated = self._replicated.full_weights()
        for shard in self._shards:
            if shard.name in replicated:
                full = replicated[shard.name]
            else:
                full = gather_parameter(shard, self._comm, self._device)
            yield shard.name, full if dtype is None else full.to(dtype)

    def close(self, *, give_back: bool = True) -> None:
        """Release shared memory, files and threads."""
        for handle in self._gradient_listeners:
            handle.remove()
        if give_back:
            if self._in_backward:
                self.cancel_backward()
            self._release()
            self._reads.close()
            unshard_model(
                self._units, self._layout, self._comm, self._device, self._ownership, self._hooks
            )
        self.updater.close()
        self._comm.close()
        if self._close_mesh is not None:
            self._close_mesh()
        self._close_mesh = None

    def _release(self) -> None:
        """Free gathered weights, which a forward without backward leaves in the root."""
        for unit in self._units:
            unit.reshard()


def _local_part(tensor: Tensor) -> Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def build_stage3(inputs: StageInputs) -> Stage3:
    """Shard the model and build its stage. **Collective**.

    Args:
        inputs: Inputs of the stage; the module is sharded in place.

    Returns:
        The stage.
    """
    comm = inputs.observer.timed(connect(inputs.mesh.shard.group, inputs.device))
    if inputs.config.zero_optimization.offload_param.device == "nvme":
        inputs = replace(inputs, memory=ENGINE_PARTS["nvme_parameters"](inputs))
    mesh, close_mesh = open_mesh(inputs)
    units: list[FSDPModule] = []
    layout: Layout | None = None
    try:
        originals = FrozenOriginals(comm, inputs.device, inputs.memory.copy)
        units = shard_module(inputs, comm, mesh, originals)
        layout = lay_out(inputs, units, comm, factor=_averaging_factor(inputs))
        initialize_root(inputs.module)
        collectives = _install_collectives(inputs, units, comm)
        gather_for_standalone_calls(units, None if collectives is None else collectives.refresh)
        kind = ShardUpdate if inputs.optimizer_factory.elementwise else FullParameterUpdate
        update = kind(inputs, layout, comm, _updater_factory(inputs))
        # Compiled code assumes that modules have plain dictionaries.
        reads = OutsideReads(units[-1:] if inputs.config.compile.enabled else units)
    except ConfigError:  # a user error, raised on every rank: leave the model usable
        if layout is not None:
            unshard_model(units, layout, comm, inputs.device, inputs.ownership, GradientHooks())
        comm.close()
        close_mesh()
        raise
    return Stage3(inputs, units, layout, update, comm, collectives, close_mesh, originals, reads)


def _install_collectives(
    inputs: StageInputs, units: Sequence[FSDPModule], comm: Communicator
) -> CustomCollectives | None:
    """Replace the collectives of ``fully_shard`` on CPU, and all its copies for a single rank."""
    config, replicas = inputs.config, inputs.mesh.replicate.size
    alone = comm.size == 1 and config.zero_optimization.offload_param.device == "none"
    on_cpus = comm.size > 1 and inputs.device.type == "cpu"
    collectives = None
    if alone or on_cpus:
        collectives = install_collectives(
            units,
            comm,
            inputs.device,
            factor=_averaging_factor(inputs),
            dtype=inputs.precision.communicate or inputs.precision.accumulate,
            observer=inputs.observer,
            apart=inputs.memory.in_files,
        )
    if on_cpus:
        return collectives
    group = inputs.mesh.shard.group
    if group is not None and not uses_nccl(group, inputs.device):
        for unit in units:  # only NCCL can compute means
            unit.set_force_sum_reduction_for_comms(True)
    if config.gradient_allreduce_op == "sum":
        for unit in units:
            unit.set_gradient_divide_factor(1.0 / replicas)
    return collectives


def _averaging_factor(inputs: StageInputs) -> float:
    """Return the factor of the gradients' sum over the shard axis."""
    config = inputs.config
    averaging = Averaging.of(
        inputs.mesh.data.size,
        operation=config.gradient_allreduce_op,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
    ).before_replica_mean(inputs.mesh.replicate.size)
    return averaging.before * averaging.after


def _updater_factory(inputs: StageInputs) -> Callable[[UpdaterInputs], Updater]:
    """Choose where optimizer states live."""
    zero = inputs.config.zero_optimization
    offload, on_host = zero.offload_optimizer.device, zero.offload_param.device != "none"
    if offload == "nvme" or (offload == "cpu" and not on_host):
        return build_offloaded
    return build_updater
