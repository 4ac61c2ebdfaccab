"""Whole tensors out of an engine and into it, by name, whatever the stage has cut.

A weight is the one that the optimizer updates (fp32 in mixed precision). Each rank puts in what
it keeps (:class:`~zerotrial.engine.protocols.Piece`); no stage needs its own code for it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerolab.schema.section import suggest
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.state import module_tensors, set_module_tensor
from zerotrial.engine.comm.watchdog import CollectiveWatchdog, collective
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Axis, Mesh, tie_of
from zerotrial.engine.module.full_tensor import full_tensor_of, is_sharded
from zerotrial.engine.protocols import Piece, Stage
from zerotrial.engine.tensor.model_sharding import ShardedModel

__all__ = ["WholeCalls", "gather_whole"]

_WEIGHT, _GRADIENT = "weight", "gradient"


class WholeCalls:
    """What reads and writes whole weights, gradients and optimizer states."""

    module: nn.Module
    stage: Stage
    scaler: LossScaler
    mesh: Mesh
    divided: ShardedModel
    device: torch.device
    watchdog: CollectiveWatchdog

    @property
    def weights(self) -> "WholeCalls":
        """What reads and writes whole tensors: ``full``, ``set_full``, ``gathered``."""
        return self

    @collective
    def full(self, name: str, kind: str = _WEIGHT) -> Tensor | None:
        """Return one whole tensor on every rank. **Collective**.

        Of pipeline stages every rank calls, whichever stage has the parameter, and gets it.

        Args:
            name: Of a parameter, in ``module.named_parameters()`` of any pipeline stage; any of a
                tied one's names.
            kind: ``weight``; ``gradient``, averaged over the ranks as far as they have come, and
                free of the loss scale; or an optimizer state by its name, such as ``exp_avg``.

        Returns:
            A copy of the parameter's shape, on the engine's device: the master weight where there
            is one. None where there is no such gradient or state.

        Raises:
            EngineError: If no parameter has the name; on all ranks alike.
        """
        return self._where_it_is(name, lambda first: self._full(first, kind))

    def _full(self, first: str, kind: str) -> Tensor | None:
        found = self._full_part(first, kind)
        return None if found is None else self.divided.whole(first, found)

    def _full_part(self, first: str, kind: str) -> Tensor | None:
        """As :meth:`full`, of what a tensor-parallel rank has."""
        if kind == _GRADIENT:
            return self._full_gradient(first)
        if kind == _WEIGHT and first not in self._trained_shapes():
            value = self.stage.originals.whole(first, _whole_of_module(self.module, first))
            return value.to(self.device)
        if kind != _WEIGHT:
            self.stage.prepare_states()
        label = "master" if kind == _WEIGHT else kind
        return self._sum_of(self.stage.pieces(), first, label)

    @collective
    def set_full(self, name: str, value: Tensor, kind: str = _WEIGHT) -> None:
        """Write one whole tensor, which is the same on every rank. **Collective**.

        Of pipeline stages every rank calls; of a tied layer all copies are written.

        Args:
            name: Of a parameter, in ``module.named_parameters()`` of any pipeline stage; any of a
                tied one's names.
            value: Of the parameter's shape, any type and device. A DTensor is gathered.
            kind: See :meth:`full`. A gradient can be written between the last ``backward`` of an
                accumulation window and its ``step``.

        Raises:
            EngineError: If no parameter has the name, the shape is another, or there is nothing of
                this kind to be written; on all ranks alike.
        """
        full = full_tensor_of(value) if isinstance(value, Tensor) else value
        self._where_it_is(name, lambda first: self._set_full(name, first, full, kind))

    def _set_full(self, name: str, first: str, value: Tensor, kind: str) -> None:
        shape = self._trained_shapes().get(first)
        if shape is None:
            self._set_frozen(first, value, kind)
            return
        _check_shape(name, value, self.divided.shape(first, shape))
        flat = self.divided.part(first, value.detach()).reshape(-1)
        if kind == _GRADIENT:
            self._set_gradient(first, flat)
            return
        if kind != _WEIGHT:
            self.stage.prepare_states()
        label = "master" if kind == _WEIGHT else kind
        written, known = False, set[str]()
        for piece in self.stage.pieces(write=True):
            if piece.name == first:
                known |= piece.tensors.keys()
                if label in piece.tensors:
                    piece.tensors[label].copy_(flat[piece.start : piece.stop])
                    written = True
        self._check_written(first, kind, written=written, known=known)
        if kind == _WEIGHT:
            self.stage.weights_changed()

    @contextmanager
    def gathered(self, names: Iterable[str], *, modifier_rank: int | None = None) -> Iterator[None]:
        """Have parameters whole in their modules within a ``with`` block. **Collective**.

        At stage 3 what runs inside gathers nothing of them, so that ranks may run on their own, as
        in generation; a module's attribute is the whole parameter there, in the type in which the
        model computes. At the other stages they are whole at all times.

        Of pipeline stages every rank calls with all names, and has those of its own stage.

        Args:
            names: In ``module.named_parameters()`` of any pipeline stage.
            modifier_rank: The data-parallel rank whose changes all ranks have at the end; None: at
                stage 3 changes are lost.

        Raises:
            EngineError: If no parameter has one of the names.
        """
        firsts = self._first_names(names)
        with self.watchdog.call("gathered"), self.stage.gathered(frozenset(firsts)):
            yield
            values = {}
            if modifier_rank is not None:
                for name in firsts:
                    values[name] = self.module.get_parameter(name).detach().clone()
        if modifier_rank is not None:
            with self.watchdog.call("gathered"):
                self._spread(values, modifier_rank)

    def _spread(self, values: dict[str, Tensor], source: int) -> None:
        """Make one rank's values everyone's, and the masters'."""
        group = self.mesh.data.group
        for value in values.values() if group is not None else ():
            dist.broadcast(value, group=group, group_src=source)
        for name, value in values.items():
            tie = tie_of(self.module.get_parameter(name))
            if tie is not None:  # the copies of other stages are to stay equal
                dist.broadcast(value, group=tie.owners.group, group_src=0)
        trained = self._trained_shapes()
        for name, value in values.items():
            if name not in trained:
                set_module_tensor(self.module.get_parameter(name), value)
        for piece in self.stage.pieces(write=True):
            if piece.name in values:
                flat = values[piece.name].reshape(-1)[piece.start : piece.stop]
                master = piece.tensors["master"]
                kept = master.to(flat.dtype) == flat  # what nobody changed keeps its last bits
                master.copy_(torch.where(kept, master, flat))
        if trained.keys() & values.keys():
            self.stage.weights_changed()

    @collective
    def full_state_dict(
        self, dtype: torch.dtype | None = None, *, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Gather weights and buffers on rank 0, in its host memory. **Collective**.

        Args:
            dtype: Of floating-point parameters; None keeps the fp32 master weights. Buffers keep
                their types.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            On rank 0 as ``module.state_dict()`` would be, under all names of tied parameters, which
            share one tensor; on the others nothing.
        """
        frozen = not exclude_frozen_parameters
        return gather_whole(
            self.module, self.stage, self.mesh, self.divided, dtype=dtype, frozen=frozen
        )

    # -- how ------------------------------------------------------------------------------------

    @property
    def _stages(self) -> Axis:
        """The pipeline stages that have one model between them; an mpu's parts have one each."""
        return Axis() if self.mesh.whole is None else self.mesh.pipe

    def _first_names(self, names: Iterable[str]) -> list[str]:
        """The first names, in order, of those that this rank's part has. **Collective**."""
        wanted = sorted(set(names))
        known = {
            name: first for first, all_ in names_by_first(self.module).items() for name in all_
        }
        everywhere = set[str]().union(*CheckpointRanks(self._stages.group).allgather(set(known)))
        for name in wanted:
            if name not in everywhere:
                hint = suggest(name, sorted(everywhere))
                raise EngineError(f"the model has no parameter {name!r}{hint}")
        return sorted({known[name] for name in wanted if name in known})

    def _where_it_is(self, name: str, call: Callable[[str], Tensor | None]) -> Tensor | None:
        """Call what works on this rank's part where the parameter is. **Collective**.

        Args:
            name: Any of the parameter's.
            call: Gets its first name; collective over the ranks of one pipeline stage.

        Returns:
            On all ranks what the first pipeline stage that has the parameter returned.

        Raises:
            EngineError: On all ranks, where no stage has it or one raised it.
        """
        first, stages = self._first_names([name]), self._stages
        if stages.size == 1:
            return call(first[0])
        found, problem = None, ""
        try:
            found = call(first[0]) if first else None
        except EngineError as error:
            problem = str(error)
        told = (bool(first), problem, None if found is None else (found.shape, found.dtype))
        answers = CheckpointRanks(stages.group).allgather(told)
        for _, text, _ in answers:
            if text:
                raise EngineError(text)
        source, like = next((at, like) for at, (has, _, like) in enumerate(answers) if has)
        if like is None:
            return None
        shape, dtype = like
        whole = found if found is not None else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(whole, group=stages.group, group_src=source)
        return whole

    def _trained_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are updated, whole, by their names. **Collective**."""
        ranks = CheckpointRanks(self.mesh.data.group)
        shapes: dict[str, torch.Size] = {}
        for found in ranks.allgather({piece.name: piece.shape for piece in self.stage.pieces()}):
            shapes |= found
        return shapes

    def _sum_of(self, pieces: Iterator[Piece], name: str, label: str) -> Tensor | None:
        """Put together what the ranks keep of one tensor; no element is kept twice."""
        own = [
            (piece.start, piece.tensors[label].detach().clone(), piece.shape)
            for piece in pieces
            if piece.name == name and label in piece.tensors
        ]
        ranks = CheckpointRanks(self.mesh.shard.group)
        known = [(values.dtype, shape) for _, values, shape in own[:1]]
        told = [item for found in ranks.allgather(known) for item in found]
        if not told:
            return None
        dtype, shape = told[0]
        whole = torch.zeros(shape.numel(), dtype=dtype, device=self.device)
        for start, values, _ in own:
            whole[start : start + values.numel()].copy_(values)
        if ranks.size > 1:  # as bytes: sums with zero of any type are exact
            dist.all_reduce(whole.view(torch.uint8), group=self.mesh.shard.group)
        return whole.view(shape)

    def _full_gradient(self, name: str) -> Tensor | None:
        self.stage.settle_gradients()
        average = self._sum_of(self.stage.gradient_pieces(), name, "gradient")
        share = self._average_of_shares(name)
        if share is not None:
            average = share if average is None else average + share
        return None if average is None else average / self.scaler.scale

    def _average_of_shares(self, name: str) -> Tensor | None:
        """Average what each rank has gathered by itself."""
        own = [
            piece.tensors["share"].detach().float().reshape(piece.shape)
            for piece in self.stage.gradient_pieces()
            if piece.name == name and "share" in piece.tensors
        ]
        ranks = CheckpointRanks(self.mesh.data.group)
        shapes = [s for found in ranks.allgather([t.shape for t in own]) for s in found]
        if not shapes:
            return None
        total = torch.zeros(shapes[0], device=self.device)
        for share in own:
            total += share.to(self.device)
        if ranks.size > 1:
            dist.all_reduce(total, group=self.mesh.data.group)
        return total * (self.stage.share_factor or 1.0)

    def _set_gradient(self, name: str, flat: Tensor) -> None:
        self.stage.settle_gradients()
        if any("share" in piece.tensors for piece in self.stage.gradient_pieces()):
            msg = "set_full(): gradients are averaged with the last backward() of an accumulation "
            raise EngineError(f"{msg}window; write them between it and step()")
        written = False
        for piece in self.stage.gradient_pieces(write=True):
            if piece.name == name and "gradient" in piece.tensors:
                part = flat[piece.start : piece.stop].to(self.device, torch.float64)
                piece.tensors["gradient"].copy_(part * self.scaler.scale)
                written = True
        self._check_written(name, _GRADIENT, written=written, known=set())

    def _check_written(self, name: str, kind: str, *, written: bool, known: set[str]) -> None:
        """Raise on all ranks alike when none had anything to be written to."""
        ranks = CheckpointRanks(self.mesh.data.group)
        answers = ranks.allgather((written, sorted(known - {"master"})))
        if any(done for done, _ in answers):
            return
        if kind == _GRADIENT:
            msg = f"set_full(): {name} has no gradient now; call it between backward() and step()"
            raise EngineError(msg)
        names = sorted({state for _, states in answers for state in states})
        have = ", ".join([_WEIGHT, _GRADIENT, *names])
        raise EngineError(f"set_full(): kind must be one of {have} for {name}, got {kind!r}")

    def _set_frozen(self, name: str, value: Tensor, kind: str) -> None:
        if kind != _WEIGHT:
            msg = f"set_full(): {name} is not trained and has no {kind}; only its weight can be "
            raise EngineError(f"{msg}written")
        target = self.module.get_parameter(name)
        _check_shape(name, value, self.divided.shape(name, target.shape))
        part = self.divided.part(name, value)
        set_module_tensor(target, part)
        self.stage.originals.write(name, part)


def whole_tensors(
    module: nn.Module,
    stage: Stage,
    divided: ShardedModel,
    dtype: torch.dtype | None = None,
    *,
    frozen: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight and persistent buffer, whole, by its first name. **Collective**.

    Args:
        module: Whose weights and buffers.
        stage: That has the trained ones.
        divided: Puts those together that are cut over tensor-parallel ranks.
        dtype: Of floating-point parameters; None gives the master weights, and frozen ones at least
            in the type of the masters. Buffers keep theirs.
        frozen: Whether parameters that are not trained are wanted too.
    """
    trained, wide = set(), None
    for name, tensor in stage.full_weights(dtype):
        trained.add(name)
        wide = tensor.dtype if wide is None else torch.promote_types(wide, tensor.dtype)
        yield name, divided.whole(name, tensor)
    parameters = names_by_first(module)
    for name, tensor in module_tensors(module, trained, frozen=frozen, originals=stage.originals):
        value = divided.whole(name, tensor)
        if name in parameters and tensor.is_floating_point():
            widened = value.dtype if wide is None else torch.promote_types(value.dtype, wide)
            value = value.to(dtype or widened)
        yield name, value


def gather_whole(
    module: nn.Module,
    stage: Stage,
    mesh: Mesh,
    divided: ShardedModel,
    *,
    dtype: torch.dtype | None = None,
    frozen: bool = True,
) -> dict[str, Tensor]:
    """Gather weights and buffers of all pipeline stages, in host memory. **Collective**.

    Args:
        module: This rank's part of the model.
        stage: That has the trained weights.
        mesh: Of the engine.
        divided: See :func:`whole_tensors`.
        dtype: See :func:`whole_tensors`.
        frozen: See :func:`whole_tensors`.

    Returns:
        On rank 0 by all names, those of tied parameters too, which share one tensor; on the others
        nothing. Of an mpu's parts, each has its own.
    """
    together = mesh.whole is not None
    first = mesh.data.rank == 0 and (not together or mesh.tensor.rank == 0)
    sends = together and mesh.pipe.rank > 0
    names, counts = names_by_first(module), mesh.counted_parameters(module.parameters())
    own = {name for name, parameter in module.named_parameters() if parameter in counts}
    found: dict[str, Tensor] = {}
    # Collectives at stage 3, so that every rank walks.
    for name, tensor in whole_tensors(module, stage, divided, dtype, frozen=frozen):
        if not first or (name in names and name not in own):
            continue
        value = tensor.detach().to("cpu", copy=True).contiguous()
        if sends:
            dist.send_object_list([(name, value)], group=mesh.pipe.group, group_dst=0)
        else:
            found.update(dict.fromkeys(names.get(name, [name]), value))
    if first and sends:
        dist.send_object_list([None], group=mesh.pipe.group, group_dst=0)
    elif first and together:
        for other in range(1, mesh.pipe.size):
            found.update(_received(mesh, other))
    return found


def _received(mesh: Mesh, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what another pipeline stage sends."""
    box: list[Any] = [()]
    while True:
        dist.recv_object_list(box, group=mesh.pipe.group, group_src=stage)
        if box[0] is None:
            return
        yield box[0]


def names_by_first(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first of them."""
    by_parameter: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return {names[0]: names for names in by_parameter.values()}


def _whole_of_module(module: nn.Module, name: str) -> Tensor:
    value = module.get_parameter(name).detach()
    return full_tensor_of(value) if is_sharded(value) else value.clone()


def _check_shape(name: str, value: Tensor, shape: torch.Size) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise EngineError(f"set_full(): {name} must get a tensor {tuple(shape)}, got {found}")
