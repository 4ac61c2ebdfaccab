"""Which part of a model-parallel job this rank plays, as far as data and metrics go."""

from dataclasses import dataclass
from typing import Any

from zerotrial.engine.mesh import Mesh
from zerotrial.ranks import Distributed

__all__ = ["ModelParallelUnit", "make_data_parallel_mpu", "make_mesh_mpu", "make_pipeline_mpu"]


@dataclass(frozen=True)
class ModelParallelUnit:
    """What the trial loop must know about model parallelism.

    Args:
        data_parallel_rank: Index of the model replica that this rank belongs to.
        data_parallel_world_size: Number of replicas.
        should_report_metrics: Whether this rank's metrics count.
        should_build_data_loader: Whether this rank reads data.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool = True
    should_build_data_loader: bool = True


def make_data_parallel_mpu(distributed: Distributed) -> ModelParallelUnit:
    """Every rank holds a replica of its own."""
    return ModelParallelUnit(distributed.rank, distributed.size)


def make_mesh_mpu(mesh: Mesh, *, pipeline: bool) -> ModelParallelUnit:
    """Read the unit off an engine's mesh.

    Ranks of one replica read the same data. Of a pipeline the first and the last stage read
    (inputs and labels), and each metric counts once for each replica, from the last stage.

    Args:
        mesh: Of the engine.
        pipeline: Whether the engine passes data from stage to stage.
    """
    last = mesh.pipe.rank == mesh.pipe.size - 1
    return ModelParallelUnit(
        data_parallel_rank=mesh.data.rank,
        data_parallel_world_size=mesh.data.size,
        should_report_metrics=mesh.tensor.rank == 0 and (last or not pipeline),
        should_build_data_loader=mesh.pipe.rank == 0 or last or not pipeline,
    )


def make_pipeline_mpu(grid: Any) -> ModelParallelUnit:
    """Read the unit off a pipeline engine's grid (DeepSpeed's ``PipelineParallelGrid`` or ours).

    The first and the last pipeline stage read data (inputs and labels), once for each
    tensor-parallel group.
    """
    stage = grid.get_pipe_parallel_rank()
    last = grid.get_pipe_parallel_world_size() - 1
    slice_rank = getattr(grid, "get_slice_parallel_rank", lambda: 0)()
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=True,
        should_build_data_loader=slice_rank == 0 and stage in (0, last),
    )
