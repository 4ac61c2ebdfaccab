"""Coordinates of a rank, with the names of DeepSpeed's pipeline grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["Grid"]


class Grid:
    """Grid of an engine's ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_stage_id(self) -> int:
        """Return the pipeline stage of this rank."""
        return self._mesh.pipe.rank

    get_pipe_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._mesh.pipe.size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of one pipeline; None for a single rank."""
        return self._mesh.pipe.group

    def get_data_parallel_rank(self) -> int:
        """Return the replica of this rank."""
        return self._mesh.data.rank

    get_data_parallel_id = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self._mesh.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the data-parallel group; None for a single rank."""
        return self._mesh.data.group

    def get_slice_parallel_rank(self) -> int:
        """Return the tensor-parallel rank."""
        return self._mesh.tensor.rank

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self._mesh.tensor.size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the tensor-parallel group; None for a single rank."""
        return self._mesh.tensor.group

    get_tensor_model_parallel_group = get_slice_parallel_group

    def get_global_rank(self) -> int:
        """Return the global rank."""
        return 0 if self._mesh.all_ranks is None else self._mesh.all_ranks.rank
