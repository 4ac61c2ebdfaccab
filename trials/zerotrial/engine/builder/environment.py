"""Environment of an engine, resolved before the model is touched: device, mesh, batch sizes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError
from zerotrial.engine.comm.process_group import start_process_group
from zerotrial.engine.memory.heap import keep_freed_memory, return_freed_memory
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.precision import Precision, choose_precision
from zerotrial.engine.protocols import ENGINE_PARTS

if TYPE_CHECKING:
    from zerotrial.engine.protocols import PipelineModel

__all__ = [
    "ENV_AUTOTUNE",
    "EngineEnvironment",
    "choose_device",
    "current_planner",
    "find_environment",
    "find_process_group",
    "is_pipeline",
    "planning",
]

ENV_AUTOTUNE = "ZEROLAB_AUTOTUNE"
"""Directory of a run that the autotuner measures; unset in all others."""

Planner = Callable[[nn.Module, EngineConfig, Any, Any], Any]
_planner: "ContextVar[Planner | None]" = ContextVar("planner", default=None)
# Not an argument: a trial's own __init__ calls PipelineModule() and initialize(), which get nothing
# from whoever plans it.


@contextmanager
def planning(planner: Planner) -> Iterator[None]:
    """Inspect models in this context: ``initialize`` calls a planner and builds no engine.

    A ``PipelineModule`` has all layers then, as one stage, without the ranks that train it.

    Args:
        planner: Gets model, configuration, optimizer argument and ``model_parameters``, and
            returns a replacement for the engine. The model is not changed.
    """
    token = _planner.set(planner)
    try:
        yield
    finally:
        _planner.reset(token)


def current_planner() -> Planner | None:
    """Return the planner of :func:`planning`; None outside of it."""
    return _planner.get()


def is_pipeline(model: nn.Module) -> "TypeGuard[PipelineModel]":
    """Return whether a model has pipeline stages, as a PipelineModule has."""
    return getattr(type(model), "has_pipeline_stages", False)


@dataclass(frozen=True)
class EngineEnvironment:
    """Resolved device, mesh, batch sizes and precision of an engine."""

    config: EngineConfig
    device: torch.device
    mesh: Mesh
    batch: BatchSizes
    precision: Precision


def find_environment(
    config: EngineConfig,
    model: nn.Module,
    device: torch.device,
    mpu: Any,
    world: "dist.ProcessGroup | None",
) -> EngineEnvironment:
    """Build the mesh and resolve the batch sizes. **Collective**.

    Args:
        config: The engine's configuration.
        model: The model; a PipelineModule defines the number of pipeline stages.
        device: Device from :func:`choose_device`.
        mpu: See :func:`~zerotrial.extensions.mpu.mesh_of`.
        world: Process group from :func:`find_process_group`.

    Raises:
        ConfigError: If the batch sizes do not fit together, or if pipeline stages are
            configured for a model that is no PipelineModule.
    """
    if (config.pipeline.stages or 1) > 1 and not is_pipeline(model):
        problem = f"pipeline.stages: needs a PipelineModule, got {type(model).__name__}; leave it "
        raise ConfigError(config.source, [f"{problem}out, or write the model as a list of layers"])
    if config.zero_optimization.offload_param.device == "nvme":
        return_freed_memory()
    elif device.type == "cpu":
        keep_freed_memory()
    if config.sequence_parallel_size > 1:
        _check_sequence(config, model, mpu, 1 if world is None else dist.get_world_size(world))
    mesh = _make_mesh(mpu, world, model, config)
    batch = config.batch_sizes(mesh.replicas)
    if is_pipeline(model):
        model.check_config(config, batch.accumulation_steps)
    return EngineEnvironment(
        config, device, mesh, batch, choose_precision(config, batch.accumulation_steps)
    )


def choose_device(device: "torch.device | str | None") -> torch.device:
    """Return the training device: by default the local rank's GPU, or the CPU without one.

    Raises:
        ConfigError: If the device does not exist.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            problem = f"device: must be one that this machine has, got {chosen}; use cpu"
            raise ConfigError("initialize()", [f"{problem}, or install a CUDA build of torch"])
        if chosen.index is None:
            local = os.environ.get("LOCAL_RANK")
            # A launcher may have made only the rank's GPU visible.
            index = int(local) % torch.cuda.device_count() if local else torch.cuda.current_device()
            chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def find_process_group(device: torch.device, *, start: bool | None) -> "dist.ProcessGroup | None":
    """Return the group of all ranks. **Collective** if it starts torch.distributed.

    Args:
        device: Training device.
        start: Whether to start torch.distributed; None: if the environment describes ranks.
    """
    if not dist.is_initialized() and start is not False:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 or start:
            backend = "nccl" if device.type == "cuda" else "gloo"
            start_process_group(backend)
    return dist.group.WORLD if dist.is_initialized() else None


def _check_sequence(config: EngineConfig, model: nn.Module, mpu: Any, ranks: int) -> None:
    """Raise if tokens cannot be divided with the other arguments and keys."""
    kind = "an mpu" if mpu is not None else "a PipelineModule" if is_pipeline(model) else None
    problem = config.layout_problem(ranks)
    if kind is not None:
        size = config.sequence_parallel_size
        problem = f"sequence_parallel_size: must be 1 with {kind}, got {size}"
    if problem is not None:
        raise ConfigError(config.source, [problem])


def _make_mesh(
    mpu: Any, world: "dist.ProcessGroup | None", model: nn.Module, config: EngineConfig
) -> Mesh:
    """Build the mesh. **Collective** over all ranks."""
    tensor, shard = config.tensor_parallel.size, config.zero_optimization.shard_ranks
    if mpu is None:
        pipe = model.num_stages if is_pipeline(model) else 1
        sequence = config.sequence_parallel_size
        return Mesh.make(world, pipe=pipe, tensor=tensor, sequence=sequence, shard=shard)
    if shard is not None:
        problem = "zero_optimization.mics_shard_size: must be -1 with an mpu, which gives the "
        raise ConfigError("initialize()", [f"{problem}groups, got {shard}"])
    if is_pipeline(model):
        problem = "mpu: must be left out with a PipelineModule, which defines the layout of ranks"
        raise ConfigError("initialize()", [problem])
    mesh = Mesh() if world is None else ENGINE_PARTS["mpu"](mpu, model, tensor_size=tensor)
    if tensor not in (1, mesh.tensor.size):
        actual = f"got {tensor} with {mesh.tensor.size} tensor-parallel ranks"
        problem = f"tensor_parallel.size: must be the size of mpu, or be left out, {actual}"
        raise ConfigError("initialize()", [problem])
    return mesh
