"""The ranks of a run as a mesh of three axes: the only source of groups, and of who counts.

No other file makes a process group or a ``DeviceMesh``; what needs one beside the axes asks
:func:`group_on_cpu` or :func:`group_alike`.

::

                data 0              data 1
             tensor 0   1        tensor 0   1       8 ranks: 2 pipeline stages, 2 replicas of
    pipe 0     [r0]   [r1]         [r2]   [r3]      the model, its matrices cut in 2
    pipe 1     [r4]   [r5]         [r6]   [r7]

Along **data** every rank has the same part of the model, and another part of the batch. Along
**pipe** every rank has parameters of its own. Along **tensor** some parameters are cut, which have
the attribute ``model_parallel`` or ``tensor_model_parallel``; all others are whole on every rank.

Hybrid sharding cuts the data axis in two: states are sharded over the ranks of **shard**, which lie
next to each other, and are the same along **replicate**.

One rule follows, for every stage: a parameter counts on the first rank of each axis that it is
replicated over, in the norm and in checkpoints. (Along data, stages see to it: they count elements,
and each where it is kept.)
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerolab.errors import ConfigError

__all__ = ["Axis", "Mesh", "Tie", "group_alike", "group_on_cpu", "is_cut", "tie_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MARKS = ("model_parallel", "tensor_model_parallel")
_TIE = "pipeline_tie"
_DATA = ("get_data_parallel_group",)
_TENSOR = ("get_tensor_model_parallel_group", "get_slice_parallel_group")
_PIPE = ("get_pipe_parallel_group", "get_pipeline_model_parallel_group")
_MODEL = ("get_model_parallel_group",)
"""What an ``mpu`` may be asked: Megatron's names, and DeepSpeed's."""


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether a parameter is marked as cut along the tensor axis."""
    return any(getattr(parameter, mark, False) for mark in _MARKS)


def tie_of(parameter: nn.Parameter) -> Tie | None:
    """What a parameter is tied to on other pipeline stages; None where it is this stage's own."""
    found: Tie | None = getattr(parameter, _TIE, None)
    return found


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one along one axis only."""

    group: dist.ProcessGroup | None = None
    """None where this rank is alone."""

    @property
    def size(self) -> int:
        """How many."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def device_mesh(self, kind: str) -> DeviceMesh:
        """Give the ranks as torch's functions want them; torch.distributed must be started.

        Args:
            kind: Of the devices that train: cpu or cuda.
        """
        group = self.group
        if group is None:
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            group = cast("dist.ProcessGroup", alone)
        return DeviceMesh.from_group(group, kind)


_ALONE = Axis()


@dataclass(frozen=True)
class Tie:
    """A parameter that several pipeline stages have: one parameter, kept on each of its owners."""

    key: str
    """Which; the same on all owners."""

    owners: Axis
    """The ranks that have it, along the pipe axis."""

    def put_on(self, parameter: nn.Parameter) -> None:
        """Mark a parameter, before a stage takes it over."""
        setattr(parameter, _TIE, self)


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. A process without torch.distributed is ``Mesh()``."""

    pipe: Axis = _ALONE
    data: Axis = _ALONE
    tensor: Axis = _ALONE

    model: Axis | None = None
    """All ranks of this model replica, where they are known in one group: pipe x tensor."""

    whole: Axis | None = None
    """All ranks, where the parts that they have bear the names of one model; None for an mpu's."""

    hybrid: tuple[Axis, Axis] | None = None
    """Replicate and shard, where states are sharded over a part of the data axis only."""

    @classmethod
    def make(
        cls,
        world: dist.ProcessGroup | None,
        *,
        pipe: int = 1,
        tensor: int = 1,
        shard: int | None = None,
    ) -> Mesh:
        """Lay the ranks out. **Collective** over all of them.

        Args:
            world: All ranks; None for one process.
            pipe: Pipeline stages.
            tensor: Ranks that a cut parameter is cut over.
            shard: Ranks that states are sharded over; None: the whole data axis.

        Raises:
            ConfigError: If the ranks cannot be laid out so.
        """
        ranks = 1 if world is None else dist.get_world_size(world)
        data, rest = divmod(ranks, pipe * tensor)
        problems = []
        if rest or not data:
            problems.append(
                f"world size: must be a multiple of pipeline stages x tensor-parallel size = "
                f"{pipe} x {tensor} = {pipe * tensor}, got {ranks}"
            )
        elif shard is not None and data % shard:
            problems.append(
                "zero_optimization.mics_shard_size: must divide the data-parallel size "
                f"{data}, got {shard}"
            )
        if problems:
            raise ConfigError("initialize()", problems)
        if world is None:
            return cls()
        layout = torch.arange(ranks).view(pipe, data, tensor)
        split = None
        if shard is not None and shard < data:
            parts = layout.view(pipe, data // shard, shard, tensor)
            split = _axis(parts.movedim(1, -1), world), _axis(parts.movedim(2, -1), world)
        alone = pipe == tensor == 1
        return cls(
            pipe=_axis(layout.movedim(0, -1), world),
            data=Axis(world) if alone else _axis(layout.movedim(1, -1), world),
            tensor=_axis(layout, world),
            whole=Axis(world),
            hybrid=split,
        )

    def owners(self, stages: Sequence[int]) -> Axis:
        """Make the groups of some pipeline stages. **Collective** over all ranks of the mesh.

        Args:
            stages: In ascending order.

        Returns:
            This rank's, along the pipe axis; alone where it is of no such stage.
        """
        assert self.whole is not None
        assert self.whole.group is not None
        rows = torch.arange(self.whole.size).view(*self.layout.values())[list(stages)]
        return _axis(rows.movedim(0, -1), self.whole.group)

    @property
    def shard(self) -> Axis:
        """The ranks that states are sharded over: all of the data axis, or a part of it."""
        return self.data if self.hybrid is None else self.hybrid[1]

    @property
    def replicate(self) -> Axis:
        """The ranks that have the same shard as this one."""
        return _ALONE if self.hybrid is None else self.hybrid[0]

    @property
    def saving(self) -> Axis:
        """The ranks that save and load one checkpoint together."""
        return self.data if self.whole is None else self.whole

    @property
    def layout(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in ("pipe", "data", "tensor")}

    @classmethod
    def of(
        cls, mpu: Any, world: dist.ProcessGroup | None, module: nn.Module, *, cut_over: int = 1
    ) -> Mesh:
        """Ask an ``mpu`` for the axes. **Collective** over the ranks of a model replica.

        One that knows a model-parallel group only is taken at the word of its parameters: where
        any is marked, or the engine cuts over as many ranks, the group is the tensor axis, and
        else the pipe axis.

        Args:
            mpu: Gives groups, under Megatron's or DeepSpeed's names; None is data parallel.
            world: All ranks; None for one process.
            module: This rank's part of the model, before a stage takes it over.
            cut_over: How many ranks the engine itself cuts matrices over.

        Raises:
            ConfigError: If the groups do not fit together, or do not say who holds what.
        """
        if mpu is None or world is None:
            return cls.make(world)
        data = _ask(mpu, _DATA)
        if data is None:
            raise ConfigError("initialize()", [f"mpu: must give {_DATA[0]}(), got none"])
        tensor, pipe, model = (_ask(mpu, names) for names in (_TENSOR, _PIPE, _MODEL))
        if model is None:
            return cls(pipe or _ALONE, data, tensor or _ALONE)
        if tensor is None and pipe is None:
            held = _held_by_each(model, module)
            if not any(one.marked for one in held):
                to_be_cut = model.size == cut_over
                return cls(_ALONE, data, model) if to_be_cut else cls(model, data)
            _check_whole_everywhere(held)
            return cls(_ALONE, data, model)
        if tensor is None and pipe is not None and pipe.size == model.size:
            tensor = _ALONE
        _check_sizes(tensor, pipe, model)
        assert tensor is not None
        return cls(pipe or _ALONE, data, tensor, model)

    def counts(self, parameters: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
        """Choose the parameters that count on this rank: in the norm, and where one is to write.

        Args:
            parameters: Of this rank, from before a stage replaces them.
        """
        first = self.tensor.rank == 0
        found = [parameter for parameter in parameters if first or is_cut(parameter)]
        ties = [(parameter, tie_of(parameter)) for parameter in found]
        return frozenset(p for p, tie in ties if tie is None or tie.owners.rank == 0)

    def add_over_model(self, values: Tensor) -> None:
        """Add the other parts of this model replica to ``values``, in place. **Collective**."""
        for axis in self._model_axes():
            dist.all_reduce(values, group=axis.group)

    def gather_over_model(self, value: T) -> list[T]:
        """Return what each rank of this model replica has. **Collective**."""
        return _gather(value, self._model_axes())

    def gather(self, value: T) -> list[T]:
        """Return what each rank of the mesh has. **Collective**."""
        return _gather(value, [*self._model_axes(), self.data])

    def _model_axes(self) -> list[Axis]:
        axes = [self.tensor, self.pipe] if self.model is None else [self.model]
        return [axis for axis in axes if axis.size > 1]


def group_on_cpu(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks that neither waits for a GPU nor meets others. **Collective**.

    Args:
        timeout: Of its collectives; torch's by default.
    """
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def group_alike(names: Sequence[str]) -> dist.ProcessGroup:
    """Make a group on CPU of the ranks that bear this one's name. **Collective** over all.

    Args:
        names: Of each rank, in their order; the same everywhere.
    """
    own: Any = None
    for name in dict.fromkeys(names):
        ranks = [rank for rank, other in enumerate(names) if other == name]
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    return cast("dist.ProcessGroup", own)


def _axis(rows: Tensor, world: dist.ProcessGroup) -> Axis:
    """Make the groups along the last dimension, and return this rank's. **Collective**.

    Args:
        rows: Ranks, as places in the world; any number of dimensions.
        world: All ranks.
    """
    own, found = dist.get_rank(world), _ALONE
    for row in rows.reshape(-1, rows.shape[-1]).tolist() if rows.shape[-1] > 1 else ():
        group = dist.new_group([dist.get_global_rank(world, rank) for rank in row])
        if own in row:
            found = Axis(group)
    return found


def _gather(value: T, axes: Iterable[Axis]) -> list[T]:
    found = [value]
    for axis in axes:
        if axis.size > 1:
            parts: list[Any] = [None] * axis.size
            dist.all_gather_object(parts, found, group=axis.group)
            found = [one for part in parts for one in part]
    return found


def _ask(mpu: Any, names: Iterable[str]) -> Axis | None:
    """Return the group that an ``mpu`` has under the first of these names; None if it has none."""
    for name in names:
        find = getattr(mpu, name, None)
        group = find() if callable(find) else None
        if group is not None:
            return Axis(group)
    return None


def _check_sizes(tensor: Axis | None, pipe: Axis | None, model: Axis) -> None:
    if tensor is None:
        assert pipe is not None
        problem = (
            f"mpu: must give {_TENSOR[0]}() where {_MODEL[0]}() has more ranks ({model.size}) than "
            f"{_PIPE[0]}() ({pipe.size}), got none; without it nobody knows which parameters count"
        )
        raise ConfigError("initialize()", [problem])
    expected = model.size if pipe is None else tensor.size * pipe.size
    if expected != model.size or model.size % tensor.size:
        stages = "any number of" if pipe is None else pipe.size
        problem = (
            f"mpu: {_MODEL[0]}() must have tensor x pipe ranks, got {model.size} with "
            f"{tensor.size} along tensor and {stages} along pipe"
        )
        raise ConfigError("initialize()", [problem])


@dataclass(frozen=True)
class _Held:
    """What one rank of a model-parallel group has."""

    marked: bool
    whole: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and digest of every parameter that is not marked."""


def _held_by_each(model: Axis, module: nn.Module) -> list[_Held]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    own = _Held(
        any(is_cut(parameter) for parameter in trained.values()),
        {n: (tuple(p.shape), _digest(p)) for n, p in trained.items() if not is_cut(p)},
    )
    found: list[Any] = [own] * model.size
    dist.all_gather_object(found, own, group=model.group)
    return found


def _digest(parameter: nn.Parameter) -> str:
    value = parameter.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    return hashlib.blake2b(value.numpy().tobytes(), digest_size=16).hexdigest()


def _check_whole_everywhere(held: list[_Held]) -> None:
    """See to it that ranks which differ in what should be whole on each are not one tensor axis."""
    names = sorted({name for one in held for name in one.whole})
    shapes = [[one.whole.get(name, (None, ""))[0] for one in held] for name in names]
    values = [[one.whole.get(name) for one in held] for name in names]
    told = (
        "mark what is cut, and where ranks are pipeline stages too, give "
        f"{_TENSOR[0]}() and {_PIPE[0]}()"
    )
    if unlike := _named([n for n, found in zip(names, shapes, strict=True) if _differ(found)]):
        problem = (
            f"mpu: ranks of {_MODEL[0]}() must all have every parameter that is not marked "
            f"model_parallel, in one shape, which does not hold for {unlike}; {told}"
        )
        raise ConfigError("initialize()", [problem])
    if unlike := _named([n for n, found in zip(names, values, strict=True) if _differ(found)]):
        logger.warning(
            "mpu: parameters that are not marked model_parallel count once in the gradient norm, "
            "as they are taken to be the same on all ranks of %s(); these differ: %s; %s",
            _MODEL[0],
            unlike,
            told,
        )


def _differ(found: list[Any]) -> bool:
    return any(one != found[0] for one in found)


def _named(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
