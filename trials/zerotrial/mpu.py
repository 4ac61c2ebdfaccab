"""Role of a rank in a model-parallel job, for data loading and metrics."""

from dataclasses import dataclass

from zerotrial.engine.mesh import Mesh
from zerotrial.ranks import Distributed

__all__ = ["ModelParallelUnit", "make_data_parallel_mpu", "make_mesh_mpu"]


@dataclass(frozen=True)
class ModelParallelUnit:
    """Role of a rank as the trial loop needs it.

    Args:
        data_parallel_rank: Index of the model replica that this rank belongs to.
        data_parallel_world_size: Number of replicas.
        should_report_metrics: Whether this rank's metrics are included in averages.
        should_build_data_loader: Whether this rank reads data.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool = True
    should_build_data_loader: bool = True


def make_data_parallel_mpu(distributed: Distributed) -> ModelParallelUnit:
    """Make the unit of plain data parallelism: each rank is a replica."""
    return ModelParallelUnit(distributed.rank, distributed.size)


def make_mesh_mpu(mesh: Mesh, *, pipeline: bool) -> ModelParallelUnit:
    """Make the unit of a rank from an engine's mesh.

    Ranks of one replica read the same data. In a pipeline the first stage reads inputs and the last
    one reads labels. The last stage reports each metric once for each replica.

    Args:
        mesh: Mesh of the engine.
        pipeline: Whether the engine is a pipeline.
    """
    last = mesh.pipe.rank == mesh.pipe.size - 1
    return ModelParallelUnit(
        data_parallel_rank=mesh.data.rank,
        data_parallel_world_size=mesh.data.size,
        should_report_metrics=mesh.tensor.rank == 0 and (last or not pipeline),
        should_build_data_loader=mesh.pipe.rank == 0 or last or not pipeline,
    )
