"""Engine as the trial loop sees it, ours or another, and the role of a rank in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerolab.errors import TrialError
from zerolab.registry import Registry
from zerotrial.engine.builder.environment import is_pipeline
from zerotrial.engine.engine import Engine
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.protocols import Observer
from zerotrial.ranks import Distributed

__all__ = [
    "EngineView",
    "ModelParallelUnit",
    "make_data_parallel_mpu",
    "make_mesh_mpu",
    "number",
    "view_of",
]

VIEWS: Registry[Callable[[Any], "EngineView"]] = Registry("zerotrial.engine_views", {})
"""Functions of extensions that make the view of another engine, or raise TrialError."""


def view_of(engine: Any) -> "EngineView":
    """Choose the adapter that reads an engine.

    Args:
        engine: From ``zerotrial.initialize``, or of a kind that an extension knows.

    Raises:
        TrialError: If it is no engine.
    """
    if isinstance(engine, Engine):
        return EngineView(engine)
    if isinstance(engine, tuple):
        raise TrialError(
            "wrap_model_engine: must get an engine, got the tuple that zerotrial.initialize "
            "returns; unpack it: `engine, *_ = zerotrial.initialize(...)`"
        )
    kind = type(engine).__name__
    msg = f"wrap_model_engine: must get an engine from zerotrial.initialize, got {kind}"
    problem = TrialError(msg)
    for name in VIEWS:
        try:
            return VIEWS[name](engine)
        except TrialError as error:
            problem = error
    raise problem


@dataclass(frozen=True)
class ModelParallelUnit:
    """Role of a rank as the trial loop needs it.

    Args:
        data_parallel_rank: Index of the model replica that this rank belongs to.
        data_parallel_world_size: Number of replicas.
        should_report_metrics: Whether this rank's metrics are included in averages.
        should_build_data_loader: Whether this rank reads data.

    Example:
        >>> zerotrial.ModelParallelUnit(data_parallel_rank=0, data_parallel_world_size=2)
        ModelParallelUnit(data_parallel_rank=0, data_parallel_world_size=2,
            should_report_metrics=True, should_build_data_loader=True)
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
        data_parallel_rank=mesh.replica,
        data_parallel_world_size=mesh.replicas,
        should_report_metrics=mesh.tensor.rank == mesh.sequence.rank == 0
        and (last or not pipeline),
        should_build_data_loader=mesh.pipe.rank == 0 or last or not pipeline,
    )


class EngineView:
    """Reads an engine of ``zerotrial.initialize``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward pass on one rank."""
        return int(self.engine.batch.micro)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step on one rank."""
        return int(self.engine.batch.accumulation_steps)

    def check_calls(self, *, once_a_batch: bool) -> None:
        """Refuse calls of ``train_batch`` that would update the weights too often.

        Args:
            once_a_batch: Whether it trains all micro-batches of a batch in one call.

        Raises:
            TrialError: If every ``engine.step()`` updates, and it is called for each micro-batch.
        """
        managed = self.engine.config.managed_gradient_accumulation
        if not managed and not once_a_batch and self.accumulation_steps > 1:
            raise TrialError(
                "managed_gradient_accumulation: must be true where train_batch is called for each "
                f"of {self.accumulation_steps} micro-batches, got false, with which each "
                "engine.step() is an update; call context.disable_auto_grad_accumulation(), and "
                "in train_batch engine.backward(loss) for each micro-batch and engine.step() once"
            )

    @property
    def is_pipeline(self) -> bool:
        """Whether one ``train_batch`` call trains a whole batch."""
        return is_pipeline(self.engine.module)

    def make_mpu(self) -> ModelParallelUnit | None:
        """Return the replica of this rank; None if unknown."""
        mesh = self.engine.mesh
        spread = mesh.all_ranks is not None and mesh.pipe.size * mesh.tensor.size > 1
        return make_mesh_mpu(mesh, pipeline=self.is_pipeline) if spread else None

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass needs every rank, so that all must make the same number."""
        mesh = self.engine.mesh
        spread = mesh.pipe.size * mesh.tensor.size > 1
        return spread or self.is_pipeline or self.engine.config.zero_optimization.stage >= 3

    @property
    def counters(self) -> Any:
        """Object with ``micro_steps`` and ``skipped_steps``, or without if they are not counted."""
        return self.engine.progress

    @property
    def micro_steps(self) -> int | None:
        """Micro-batches trained so far, if the engine counts them."""
        count = getattr(self.counters, "micro_steps", None)
        return count if isinstance(count, int) else None

    @property
    def skipped_steps(self) -> int | None:
        """Optimizer steps skipped so far, if the engine counts them."""
        count = getattr(self.counters, "skipped_steps", None)
        return count if isinstance(count, int) else None

    def numbers(self) -> dict[str, float]:
        """Return the values recorded of each engine by default."""
        values = {name: number(read()) for name, read in self._readers}
        known = {name: value for name, value in values.items() if value is not None}
        return {**known, **self.engine.observer.measured}

    @cached_property
    def _readers(self) -> list[tuple[str, Callable[[], Any]]]:
        engine = self.engine
        return [
            ("learning_rate", lambda: engine.optimizer.param_groups[0]["lr"]),
            ("grad_norm", lambda: engine.progress.grad_norm),
            ("loss_scale", lambda: engine.scaler.scale),
            ("skipped_steps", lambda: engine.progress.skipped_steps),
        ]

    def timed_input(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the time that is waited for micro-batches as the engine's, if it counts any."""
        observer = self.engine.observer
        return _TimedInput(batches, observer) if observer.times_phases else batches

    def save(self, directory: str, tag: str) -> None:
        """Write a checkpoint. **Collective**."""
        if hasattr(type(self.engine), "save_checkpoint"):  # of an extension, which may write more
            self.engine.save_checkpoint(directory, tag=tag)
        else:
            self.engine.checkpoint.save(directory, tag)

    def load(self, directory: str, tag: str, *, module_only: bool) -> bool:
        """Load a checkpoint; return False if there is none. **Collective**."""
        if hasattr(type(self.engine), "load_checkpoint"):
            options = {"load_module_only": module_only}
            loaded, _ = self.engine.load_checkpoint(directory, tag=tag, **options)
            return loaded is not None
        self.engine.checkpoint.load(directory, tag, module_only=module_only)
        return True

    @property
    def saves_in_background(self) -> bool:
        """Whether ``save_checkpoint`` returns before everything is written."""
        return bool(self.engine.config.checkpoint.writer.decoupled)

    @property
    def checkpoint_written(self) -> bool:
        """Whether :meth:`wait_for_checkpoint` would not have to wait for this rank."""
        return bool(self.engine.checkpoint.is_written)

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is written in the background is complete."""
        self.engine.checkpoint.wait()


class _TimedInput:
    def __init__(self, batches: Iterator[Any], observer: Observer) -> None:
        self._batches = batches
        self._observer = observer

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._observer.phase("input"):
            return next(self._batches)


def number(value: Any) -> float | None:
    """Return a value as a number; None if it is none."""
    if type(value) is float:
        return value
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
