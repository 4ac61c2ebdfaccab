"""Mesh of the ranks with three axes: the only source of process groups.

No other file creates a process group or a ``DeviceMesh``, except through :func:`new_cpu_group` and
:func:`new_group_by_name`.

::

                data 0              data 1
             tensor 0   1        tensor 0   1       8 ranks: 2 pipeline stages, 2 replicas of
    pipe 0     [r0]   [r1]         [r2]   [r3]      the model, its matrices cut in 2
    pipe 1     [r4]   [r5]         [r6]   [r7]

Along **data** every rank has the same part of the model, and another part of the batch. Along
**pipe** every rank has different parameters. Along **tensor** parameters with the attribute
``model_parallel`` or ``tensor_model_parallel`` are sharded; all others are replicated.

Hybrid sharding splits the data axis in two: states are sharded over the ranks of **shard**, which
are adjacent, and are equal along **replicate**.

One rule applies to every stage: a parameter counts on the first rank of each axis over which it is
replicated, in the norm and in checkpoints. (Along data the stages handle it: they count elements,
each on the rank that owns it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerolab.errors import ConfigError

__all__ = [
    "Axis",
    "Mesh",
    "Tie",
    "is_model_parallel",
    "new_cpu_group",
    "new_group_by_name",
    "tie_of",
]

T = TypeVar("T")

_SHARDED_MARKS = ("model_parallel", "tensor_model_parallel")
_TIE = "pipeline_tie"


def is_model_parallel(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is marked as sharded along the tensor axis."""
    return any(getattr(parameter, mark, False) for mark in _SHARDED_MARKS)


def tie_of(parameter: nn.Parameter) -> Tie | None:
    """Return the tie of a parameter to other pipeline stages; None if it has none."""
    tie: Tie | None = getattr(parameter, _TIE, None)
    return tie


@dataclass(frozen=True)
class Axis:
    """Ranks that differ from this one along one axis only."""

    group: dist.ProcessGroup | None = None
    """Process group; None if this rank is the only one."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Rank of this process on the axis."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def device_mesh(self, kind: str) -> DeviceMesh:
        """Return the axis as a DeviceMesh; torch.distributed must be initialized.

        Args:
            kind: Type of the training devices: cpu or cuda.
        """
        group = self.group
        if group is None:
            single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            group = cast("dist.ProcessGroup", single)
        return DeviceMesh.from_group(group, kind)


_SINGLE_RANK = Axis()


@dataclass(frozen=True)
class Tie:
    """Parameter with a copy on each of several pipeline stages, its owners."""

    key: str
    """Key of the parameter; the same on all owners."""

    owners: Axis
    """Ranks of the owners, along the pipe axis."""

    def put_on(self, parameter: nn.Parameter) -> None:
        """Mark a parameter before a stage takes it over."""
        setattr(parameter, _TIE, self)


@dataclass(frozen=True)
class Mesh:
    """Position of this rank. A process without torch.distributed is ``Mesh()``."""

    pipe: Axis = _SINGLE_RANK
    data: Axis = _SINGLE_RANK
    tensor: Axis = _SINGLE_RANK

    model: Axis | None = None
    """All ranks of this model replica (pipe x tensor), if they form one known group."""

    sequence: Axis = _SINGLE_RANK
    """Adjacent ranks of the data axis with different tokens of the same samples."""

    all_ranks: Axis | None = None
    """All ranks, if their parameters have the names of one model; None with an mpu."""

    hybrid: tuple[Axis, Axis] | None = None
    """Replicate and shard axes, if states are sharded over a part of the data axis only."""

    @classmethod
    def make(
        cls,
        world: dist.ProcessGroup | None,
        *,
        pipe: int = 1,
        tensor: int = 1,
        sequence: int = 1,
        shard: int | None = None,
    ) -> Mesh:
        """Build the mesh. **Collective** over all ranks.

        Args:
            world: Group of all ranks; None for one process.
            pipe: Number of pipeline stages.
            tensor: Number of tensor-parallel ranks.
            sequence: Number of ranks that divide the tokens of a sample; 1 with other axes.
            shard: Number of ranks that states are sharded over; None: the entire data axis.

        Raises:
            ConfigError: If the number of ranks does not fit.
        """
        ranks = 1 if world is None else dist.get_world_size(world)
        data, remainder = divmod(ranks, pipe * tensor)
        problems = []
        if remainder or not data:
            problems.append(
                f"world size: must be a multiple of pipeline stages x tensor-parallel size = "
                f"{pipe} x {tensor} = {pipe * tensor}, got {ranks}"
            )
        elif data % sequence:
            problems.append(
                f"sequence_parallel_size: must divide the number of ranks, {data}, got {sequence}"
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
        is_data_parallel = pipe == tensor == 1
        return cls(
            pipe=_axis(layout.movedim(0, -1), world),
            data=Axis(world) if is_data_parallel else _axis(layout.movedim(1, -1), world),
            tensor=_axis(layout, world),
            sequence=_axis(layout.view(-1, sequence), world) if sequence > 1 else _SINGLE_RANK,
            all_ranks=Axis(world),
            hybrid=split,
        )

    def owners(self, stages: Sequence[int]) -> Axis:
        """Create the groups of some pipeline stages. **Collective** over all ranks of the mesh.

        Args:
            stages: Indices in ascending order.

        Returns:
            This rank's group along the pipe axis; a single rank if it is in none of the stages.
        """
        assert self.all_ranks is not None
        assert self.all_ranks.group is not None
        rows = torch.arange(self.all_ranks.size).view(*self.layout.values())[list(stages)]
        return _axis(rows.movedim(0, -1), self.all_ranks.group)

    @property
    def replicas(self) -> int:
        """Number of micro-batches that the ranks read at the same time."""
        return self.data.size // self.sequence.size

    @property
    def replica(self) -> int:
        """Index of this rank's micro-batch among them."""
        return self.data.rank // self.sequence.size

    @property
    def shard(self) -> Axis:
        """Ranks that states are sharded over: all or a part of the data axis."""
        return self.data if self.hybrid is None else self.hybrid[1]

    @property
    def replicate(self) -> Axis:
        """Ranks with the same shard as this one."""
        return _SINGLE_RANK if self.hybrid is None else self.hybrid[0]

    @property
    def saving(self) -> Axis:
        """Ranks that save and load one checkpoint together."""
        return self.data if self.all_ranks is None else self.all_ranks

    @property
    def layout(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in ("pipe", "data", "tensor")}

    def counted_parameters(self, parameters: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
        """Return the parameters that count on this rank, in the norm and for writing.

        Args:
            parameters: Parameters of this rank, before a stage replaces them.
        """
        first = self.tensor.rank == 0
        candidates = [
            parameter for parameter in parameters if first or is_model_parallel(parameter)
        ]
        ties = [(parameter, tie_of(parameter)) for parameter in candidates]
        return frozenset(p for p, tie in ties if tie is None or tie.owners.rank == 0)

    def add_over_model(self, values: Tensor) -> None:
        """Add the other parts of this model replica to ``values``, in place. **Collective**."""
        for axis in self._model_axes():
            dist.all_reduce(values, group=axis.group)

    def gather_over_model(self, value: T) -> list[T]:
        """Return the values of all ranks of this model replica. **Collective**."""
        return _gather(value, self._model_axes())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks of the mesh. **Collective**."""
        return _gather(value, [*self._model_axes(), self.data])

    def _model_axes(self) -> list[Axis]:
        axes = [self.tensor, self.pipe] if self.model is None else [self.model]
        return [axis for axis in axes if axis.size > 1]


def new_cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create a CPU group of all ranks, separate from other collectives. **Collective**.

    Args:
        timeout: Timeout of its collectives; torch's by default.
    """
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def new_group_by_name(names: Sequence[str]) -> dist.ProcessGroup:
    """Create a CPU group of the ranks with this one's name. **Collective** over all.

    Args:
        names: Name of each rank, in rank order; the same list on all ranks.
    """
    local_group: Any = None
    for name in dict.fromkeys(names):
        ranks = [rank for rank, candidate in enumerate(names) if candidate == name]
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            local_group = group
    return cast("dist.ProcessGroup", local_group)


def _axis(rows: Tensor, world: dist.ProcessGroup) -> Axis:
    """Create the groups along the last dimension; return this rank's. **Collective**.

    Args:
        rows: Ranks within the world; any number of dimensions.
        world: Group of all ranks.
    """
    rank_in_world, axis = dist.get_rank(world), _SINGLE_RANK
    for row in rows.reshape(-1, rows.shape[-1]).tolist() if rows.shape[-1] > 1 else ():
        group = dist.new_group([dist.get_global_rank(world, member) for member in row])
        if rank_in_world in row:
            axis = Axis(group)
    return axis


def _gather(value: T, axes: Iterable[Axis]) -> list[T]:
    values = [value]
    for axis in axes:
        if axis.size > 1:
            parts: list[Any] = [None] * axis.size
            dist.all_gather_object(parts, values, group=axis.group)
            values = [item for part in parts for item in part]
    return values
