"""Engines of other libraries with DeepSpeed's names, as the trial loop sees them."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from zerolab.errors import TrialError
from zerotrial.engine_view import EngineView, ModelParallelUnit, number

__all__ = ["view_of_foreign"]

_REQUIRED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "save_checkpoint",
    "load_checkpoint",
    "train",
    "eval",
)


def view_of_foreign(engine: Any) -> EngineView:
    """Return the view of an engine with DeepSpeed's names.

    Args:
        engine: From ``deepspeed.initialize``, or of that shape.

    Raises:
        TrialError: If it is no engine; lists the missing attributes.
    """
    missing = [name for name in _REQUIRED if not callable(getattr(engine, name, None))]
    if missing:
        kind = type(engine).__name__
        hint = ""
        if isinstance(engine, tuple):
            hint = "; initialize returns (engine, optimizer, dataloader, lr_scheduler)"
        raise TrialError(
            f"wrap_model_engine: must get an engine as zerotrial.initialize returns it, got "
            f"{kind} without {', '.join(missing)}{hint}"
        )
    return _ForeignEngineView(engine)


class _ForeignEngineView(EngineView):
    """Reads an engine by DeepSpeed's names; missing attributes are left out."""

    def check_calls(self, *, once_a_batch: bool) -> None:
        """Accept all calls; it is unknown when the engine updates."""

    @property
    def micro_batch_size(self) -> int:
        return int(self.engine.train_micro_batch_size_per_gpu())

    @property
    def accumulation_steps(self) -> int:
        return int(self.engine.gradient_accumulation_steps())

    @property
    def is_pipeline(self) -> bool:
        if getattr(self.engine, "is_pipe_parallel", False) is True:
            return True
        return any(kind.__name__ == "PipelineEngine" for kind in type(self.engine).__mro__)

    def make_mpu(self) -> ModelParallelUnit | None:
        if not self.is_pipeline:
            return None
        return make_pipeline_mpu(getattr(self.engine, "grid", None) or self.engine.mpu)

    @property
    def forward_is_collective(self) -> bool:
        stage = getattr(self.engine, "zero_optimization_stage", None)
        if callable(stage) and int(stage()) >= 3:
            return True
        tensor = getattr(self.engine, "tensor_parallel_size", 1)
        return self.is_pipeline or (isinstance(tensor, int) and tensor > 1)

    @property
    def counters(self) -> Any:
        return self.engine

    def numbers(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, read in self._readers:
            value = number(read())
            if value is not None:
                values[name] = value
        return values

    @cached_property
    def _readers(self) -> list[tuple[str, Callable[[], Any]]]:
        """Look up the readable values once, because every batch may report them."""
        engine = self.engine
        readers: list[tuple[str, Callable[[], Any]]] = []
        if callable(getattr(engine, "get_lr", None)):
            readers.append(("learning_rate", lambda: _first(engine.get_lr())))
        if callable(getattr(engine, "get_global_grad_norm", None)):
            readers.append(("grad_norm", engine.get_global_grad_norm))
        if hasattr(getattr(engine, "optimizer", None), "cur_scale"):  # DeepSpeed's
            readers.append(("loss_scale", lambda: engine.optimizer.cur_scale))
        elif callable(getattr(engine, "loss_scale", None)):
            readers.append(("loss_scale", engine.loss_scale))
        elif hasattr(engine, "loss_scale"):
            readers.append(("loss_scale", lambda: engine.loss_scale))
        if hasattr(engine, "skipped_steps"):
            readers.append(("skipped_steps", lambda: engine.skipped_steps))
        return readers

    def timed_input(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    @property
    def saves_in_background(self) -> bool:
        return False

    @property
    def checkpoint_written(self) -> bool:
        return True

    def save(self, directory: str, tag: str) -> None:
        self.engine.save_checkpoint(directory, tag=tag)

    def load(self, directory: str, tag: str, *, module_only: bool) -> bool:
        options = {"load_module_only": True} if module_only else {}
        loaded, _ = self.engine.load_checkpoint(directory, tag=tag, **options)
        return loaded is not None

    def wait_for_checkpoint(self) -> None:
        """Return at once: saves are complete when they return."""


def _first(rates: Any) -> Any:
    if isinstance(rates, list | tuple):
        return rates[0] if rates else None
    return rates


def make_pipeline_mpu(grid: Any) -> ModelParallelUnit:
    """Make the unit of a rank from a pipeline engine's ``PipelineParallelGrid``.

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
