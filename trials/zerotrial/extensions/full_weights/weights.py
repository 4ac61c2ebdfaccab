"""Access to full tensors of an engine by name, independent of the stage's sharding.

A weight is the one that the optimizer updates (fp32 in mixed precision). Each rank contributes its
part (:class:`~zerotrial.engine.protocols.Piece`), so stages need no code for it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerolab.schema.section import suggest
from zerotrial.engine.checkpoint.files import CheckpointRanks
from zerotrial.engine.checkpoint.state import names_by_first, set_module_tensor
from zerotrial.engine.comm.call_record import collective
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Axis, Mesh, tie_of
from zerotrial.engine.module.full_tensor import full_tensor_of, is_sharded
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.protocols import Piece, Stage
from zerotrial.extensions.full_weights.export import write_weights
from zerotrial.extensions.full_weights.full_state import gather_full_state

__all__ = ["FullWeights"]

_WEIGHT, _GRADIENT = "weight", "gradient"


class FullWeights:
    """Full weights, gradients and optimizer states of an engine: ``engine.weights``.

    Args:
        engine: The engine.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
        >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
        >>> engine.weights.full("weight").shape
        torch.Size([1, 4])
    """

    def __init__(self, engine: Any) -> None:
        self.module: nn.Module = engine.module
        self.stage: Stage = engine.stage
        self.scaler: LossScaler = engine.scaler
        self.mesh: Mesh = engine.mesh
        self.divided: ShardedModel = engine.divided
        self.device: torch.device = engine.device
        self.watchdog = engine.watchdog

    @collective("full")
    def full(self, name: str, kind: str = _WEIGHT) -> Tensor | None:
        """Return one full tensor on every rank. **Collective**.

        With pipeline stages every rank calls it and gets the tensor from its stage.

        Args:
            name: Any name of a parameter in ``module.named_parameters()`` of any pipeline stage.
            kind: ``weight``; ``gradient``, averaged over the ranks so far and without loss scale;
                or the name of an optimizer state, such as ``exp_avg``.

        Returns:
            A copy in the parameter's shape, on the engine's device: the master weight if there
            is one. None if the gradient or state does not exist.

        Raises:
            EngineError: On all ranks, if no parameter has the name.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> loss = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.weights.full("bias", "gradient")
            tensor([1.])
        """
        return self._on_owning_stage(name, lambda first: self._full(first, kind))

    def _full(self, first: str, kind: str) -> Tensor | None:
        part = self._full_part(first, kind)
        return None if part is None else self.divided.full(first, part)

    def _full_part(self, first: str, kind: str) -> Tensor | None:
        """Return a tensor-parallel rank's part of :meth:`full`."""
        if kind == _GRADIENT:
            return self._full_gradient(first)
        if kind == _WEIGHT and first not in self._trained_shapes():
            value = self.stage.originals.full(first, _full_module_value(self.module, first))
            return value.to(self.device)
        if kind != _WEIGHT:
            self.stage.updater.prepare_states()
        label = "master" if kind == _WEIGHT else kind
        return self._assemble(self.stage.pieces(), first, label)

    @collective("set_full")
    def set_full(self, name: str, value: Tensor, kind: str = _WEIGHT) -> None:
        """Write one full tensor, which is equal on every rank. **Collective**.

        With pipeline stages every rank calls it; all copies of a tied layer are written.

        Args:
            name: Any name of a parameter in ``module.named_parameters()`` of any pipeline stage.
            value: Tensor of the parameter's shape, any type and device. A DTensor is gathered.
            kind: See :meth:`full`. A gradient can be written between the last ``backward`` of an
                accumulation window and its ``step``.

        Raises:
            EngineError: On all ranks, if no parameter has the name, the shape differs, or the
                parameter has no tensor of this kind.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.weights.set_full("bias", torch.tensor([0.5]))
            >>> engine.module.bias.item()
            0.5
        """
        full = full_tensor_of(value) if isinstance(value, Tensor) else value
        self._on_owning_stage(name, lambda first: self._set_full(name, first, full, kind))

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
            self.stage.updater.prepare_states()
        label = "master" if kind == _WEIGHT else kind
        written, known_kinds = False, set[str]()
        for piece in self.stage.pieces(write=True):
            if piece.name == first:
                known_kinds |= piece.tensors.keys()
                if label in piece.tensors:
                    piece.tensors[label].copy_(flat[piece.start : piece.stop])
                    written = True
        self._check_written(first, kind, written=written, known_kinds=known_kinds)
        if kind == _WEIGHT:
            self.stage.weights_changed()

    @contextmanager
    def gathered(self, names: Iterable[str], *, modifier_rank: int | None = None) -> Iterator[None]:
        """Have full parameters in their modules within a ``with`` block. **Collective**.

        At stage 3 nothing is gathered inside of the block, so that ranks may run independently, as
        in generation. A module's attribute is then the full parameter in the compute type. At other
        stages parameters are always full.

        With pipeline stages every rank passes all names, and gets those of its stage.

        Args:
            names: Names in ``module.named_parameters()`` of any pipeline stage.
            modifier_rank: Data-parallel rank whose changes are copied to all ranks at the end;
                None: changes are lost at stage 3.

        Yields:
            Nothing.

        Raises:
            EngineError: If no parameter has one of the names.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> with engine.weights.gathered(["weight"], modifier_rank=0):
            ...     torch.nn.init.ones_(engine.module.weight).sum().item()
            4.0
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
                self._broadcast_values(values, modifier_rank)

    def _broadcast_values(self, values: dict[str, Tensor], source: int) -> None:
        """Copy one rank's values to all ranks and to the masters."""
        group = self.mesh.data.group
        for value in values.values() if group is not None else ():
            dist.broadcast(value, group=group, group_src=source)
        for name, value in values.items():
            tie = tie_of(self.module.get_parameter(name))
            if tie is not None:  # keeps the copies of other stages equal
                dist.broadcast(value, group=tie.owners.group, group_src=0)
        trained = self._trained_shapes()
        for name, value in values.items():
            if name not in trained:
                set_module_tensor(self.module.get_parameter(name), value)
        for piece in self.stage.pieces(write=True):
            if piece.name in values:
                flat = values[piece.name].reshape(-1)[piece.start : piece.stop]
                master = piece.tensors["master"]
                unchanged = master.to(flat.dtype) == flat  # unchanged elements keep full precision
                master.copy_(torch.where(unchanged, master, flat))
        if trained.keys() & values.keys():
            self.stage.weights_changed()

    @collective("full_state_dict")
    def full_state_dict(
        self, dtype: torch.dtype | None = None, *, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Gather weights and buffers on rank 0, in its host memory. **Collective**.

        Args:
            dtype: Type of floating-point parameters; None keeps the fp32 master weights. Buffers
                keep their types.
            exclude_frozen_parameters: Leave out frozen parameters.

        Returns:
            On rank 0 like ``module.state_dict()``, with all names of tied parameters, which share
            one tensor; on other ranks empty.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> sorted(engine.weights.full_state_dict())
            ['bias', 'weight']
        """
        return self._full_state(dtype, frozen=not exclude_frozen_parameters)

    def _full_state(self, dtype: torch.dtype | None, *, frozen: bool) -> dict[str, Tensor]:
        return gather_full_state(
            self.module, self.stage, self.mesh, self.divided, dtype=dtype, frozen=frozen
        )

    @collective("export")
    def export(
        self,
        path: str | PathLike[str],
        dtype: torch.dtype | None = None,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Write all weights and buffers to one safetensors file. **Collective**.

        Tied parameters are stored under each of their names. Rank 0 needs host memory for the full
        model.

        Args:
            path: Path of the file, which appears when it is complete.
            dtype: Type of floating-point parameters; None keeps the fp32 master weights. Buffers
                keep their types.
            exclude_frozen_parameters: Leave out frozen parameters.

        Returns:
            The path.

        Raises:
            CheckpointError: On all ranks, if the file cannot be written.

        Example:
            >>> from safetensors.torch import load_file
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> path = engine.weights.export("model.safetensors", dtype=torch.bfloat16)
            >>> torch.nn.Linear(4, 1).load_state_dict(load_file(path))
            <All keys matched successfully>
        """
        ranks = CheckpointRanks(self.mesh.saving.group)
        tensors = self._full_state(dtype, frozen=not exclude_frozen_parameters)
        with ranks.together():
            if ranks.rank == 0:
                write_weights(Path(path), tensors)
        return str(path)

    # -- implementation -------------------------------------------------------------------------

    @property
    def _stages(self) -> Axis:
        """Pipeline stages of one model; with an mpu each part is separate."""
        return Axis() if self.mesh.all_ranks is None else self.mesh.pipe

    def _first_names(self, names: Iterable[str]) -> list[str]:
        """Return the sorted first names of the parameters on this rank. **Collective**."""
        requested = sorted(set(names))
        first_by_name = {
            name: first for first, all_ in names_by_first(self.module).items() for name in all_
        }
        everywhere = set[str]().union(
            *CheckpointRanks(self._stages.group).allgather(set(first_by_name))
        )
        for name in requested:
            if name not in everywhere:
                hint = suggest(name, sorted(everywhere))
                raise EngineError(f"the model has no parameter {name!r}{hint}")
        return sorted({first_by_name[name] for name in requested if name in first_by_name})

    def _on_owning_stage(self, name: str, call: Callable[[str], Tensor | None]) -> Tensor | None:
        """Call a function on the pipeline stage that has a parameter. **Collective**.

        Args:
            name: Any of the parameter's names.
            call: Gets its first name; collective over the ranks of one pipeline stage.

        Returns:
            On all ranks the result of the first pipeline stage that has the parameter.

        Raises:
            EngineError: On all ranks, if no stage has it or one of them raised it.
        """
        first, stages = self._first_names([name]), self._stages
        if stages.size == 1:
            return call(first[0])
        value, problem = None, ""
        try:
            value = call(first[0]) if first else None
        except EngineError as error:
            problem = str(error)
        answer = (bool(first), problem, None if value is None else (value.shape, value.dtype))
        answers = CheckpointRanks(stages.group).allgather(answer)
        for _, text, _ in answers:
            if text:
                raise EngineError(text)
        source, description = next(
            (stage, description) for stage, (has, _, description) in enumerate(answers) if has
        )
        if description is None:
            return None
        shape, dtype = description
        result = value if value is not None else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(result, group=stages.group, group_src=source)
        return result

    def _trained_shapes(self) -> dict[str, torch.Size]:
        """Return the full shapes of trained parameters by name. **Collective**."""
        ranks = CheckpointRanks(self.mesh.data.group)
        shapes: dict[str, torch.Size] = {}
        for part in ranks.allgather({piece.name: piece.shape for piece in self.stage.pieces()}):
            shapes |= part
        return shapes

    def _assemble(self, pieces: Iterator[Piece], name: str, label: str) -> Tensor | None:
        """Assemble a tensor from the ranks' parts, which do not overlap."""
        parts = [
            (piece.start, piece.tensors[label].detach().clone(), piece.shape)
            for piece in pieces
            if piece.name == name and label in piece.tensors
        ]
        ranks = CheckpointRanks(self.mesh.shard.group)
        local = [(values.dtype, shape) for _, values, shape in parts[:1]]
        gathered = [item for answer in ranks.allgather(local) for item in answer]
        if not gathered:
            return None
        dtype, shape = gathered[0]
        total = torch.zeros(shape.numel(), dtype=dtype, device=self.device)
        for start, values, _ in parts:
            total[start : start + values.numel()].copy_(values)
        if ranks.size > 1:  # as bytes: adding zeros is exact for any type
            dist.all_reduce(total.view(torch.uint8), group=self.mesh.shard.group)
        return total.view(shape)

    def _full_gradient(self, name: str) -> Tensor | None:
        self.stage.settle_gradients()
        average = self._assemble(self.stage.gradient_pieces(), name, "gradient")
        share = self._average_of_shares(name)
        if share is not None:
            average = share if average is None else average + share
        return None if average is None else average / self.scaler.scale

    def _average_of_shares(self, name: str) -> Tensor | None:
        """Average the unaveraged gradients of the ranks."""
        local = [
            piece.tensors["share"].detach().float().reshape(piece.shape)
            for piece in self.stage.gradient_pieces()
            if piece.name == name and "share" in piece.tensors
        ]
        ranks = CheckpointRanks(self.mesh.data.group)
        shapes = [s for answer in ranks.allgather([t.shape for t in local]) for s in answer]
        if not shapes:
            return None
        total = torch.zeros(shapes[0], device=self.device)
        for share in local:
            total += share.to(self.device)
        if ranks.size > 1:
            dist.all_reduce(total, group=self.mesh.data.group)
        return total * (self.stage.local_to_average or 1.0)

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
        self._check_written(name, _GRADIENT, written=written, known_kinds=set())

    def _check_written(self, name: str, kind: str, *, written: bool, known_kinds: set[str]) -> None:
        """Raise on all ranks if none of them has written anything."""
        ranks = CheckpointRanks(self.mesh.data.group)
        answers = ranks.allgather((written, sorted(known_kinds - {"master"})))
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


def _full_module_value(module: nn.Module, name: str) -> Tensor:
    value = module.get_parameter(name).detach()
    return full_tensor_of(value) if is_sharded(value) else value.clone()


def _check_shape(name: str, value: Tensor, shape: torch.Size) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise EngineError(f"set_full(): {name} must get a tensor {tuple(shape)}, got {actual}")
