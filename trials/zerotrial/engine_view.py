"""An engine as the trial loop sees it: ours, DeepSpeed's, or anything of that shape."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from zerolab.errors import TrialError
from zerotrial.engine.engine import Engine
from zerotrial.engine.protocols import Observer
from zerotrial.mpu import ModelParallelUnit, make_mesh_mpu, make_pipeline_mpu

__all__ = ["EngineView", "view_of"]

_REQUIRED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "save_checkpoint",
    "load_checkpoint",
    "train",
    "eval",
)


def view_of(engine: Any) -> "EngineView":
    """Choose the adapter that reads an engine.

    Args:
        engine: From ``zerotrial.initialize`` or ``deepspeed.initialize``, or of that shape.

    Raises:
        TrialError: If it is no engine; lists the missing attributes.
    """
    view = _OwnEngine(engine) if isinstance(engine, Engine) else EngineView(engine)
    view.check()
    return view


class EngineView:
    """Reads an engine by DeepSpeed's names; missing attributes are left out.

    Args:
        engine: From ``deepspeed.initialize``, or of that shape.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def check(self) -> None:
        """Refuse objects that are no engine.

        Raises:
            TrialError: Lists the missing attributes.
        """
        missing = [name for name in _REQUIRED if not callable(getattr(self.engine, name, None))]
        if missing:
            kind = type(self.engine).__name__
            hint = ""
            if isinstance(self.engine, tuple):
                hint = "; initialize returns (engine, optimizer, dataloader, lr_scheduler)"
            raise TrialError(
                f"wrap_model_engine: must get an engine as zerotrial.initialize returns it, got "
                f"{kind} without {', '.join(missing)}{hint}"
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward pass on one rank."""
        return int(self.engine.train_micro_batch_size_per_gpu())

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step on one rank."""
        return int(self.engine.gradient_accumulation_steps())

    def check_calls(self, *, once_a_batch: bool) -> None:
        """Refuse calls of ``train_batch`` that would update the weights too often.

        Args:
            once_a_batch: Whether it trains all micro-batches of a batch in one call.

        Raises:
            TrialError: If every ``engine.step()`` updates, and it is called for each micro-batch.
        """
        # Only of ours is it known.

    @property
    def is_pipeline(self) -> bool:
        """Whether one ``train_batch`` call trains a whole batch."""
        if getattr(self.engine, "is_pipe_parallel", False) is True:
            return True
        return any(kind.__name__ == "PipelineEngine" for kind in type(self.engine).__mro__)

    def make_mpu(self) -> ModelParallelUnit | None:
        """Return the replica of this rank; None if unknown."""
        if not self.is_pipeline:
            return None
        return make_pipeline_mpu(getattr(self.engine, "grid", None) or self.engine.mpu)

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass needs every rank, so that all must make the same number."""
        stage = getattr(self.engine, "zero_optimization_stage", None)
        if callable(stage) and int(stage()) >= 3:
            return True
        tensor = getattr(self.engine, "tensor_parallel_size", 1)
        return self.is_pipeline or (isinstance(tensor, int) and tensor > 1)

    @property
    def micro_steps(self) -> int | None:
        """Micro-batches trained so far, if the engine counts them."""
        count = getattr(self.engine, "micro_steps", None)
        return count if isinstance(count, int) else None

    @property
    def skipped_steps(self) -> int | None:
        """Optimizer steps skipped so far, if the engine counts them."""
        count = getattr(self.engine, "skipped_steps", None)
        return count if isinstance(count, int) else None

    def numbers(self) -> dict[str, float]:
        """Return the values recorded of each engine by default."""
        numbers = {}
        for name, read in self._readers:
            number = _number(read())
            if number is not None:
                numbers[name] = number
        return numbers

    @cached_property
    def _readers(self) -> list[tuple[str, Callable[[], Any]]]:
        """What there is to read is looked up once; a report may come with every batch."""
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
        """Count the time that is waited for micro-batches as the engine's, if it counts any."""
        return batches

    @property
    def saves_in_background(self) -> bool:
        """Whether ``save_checkpoint`` returns before everything is written."""
        return False

    @property
    def checkpoint_written(self) -> bool:
        """Whether :meth:`wait_for_checkpoint` would not have to wait for this rank."""
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is written in the background is complete."""

    def save(self, directory: str, tag: str) -> None:
        """Write a checkpoint. **Collective**."""
        self.engine.save_checkpoint(directory, tag=tag)

    def load(self, directory: str, tag: str, *, module_only: bool) -> bool:
        """Load a checkpoint; return False if there is none. **Collective**."""
        options = {"load_module_only": True} if module_only else {}
        loaded, _ = self.engine.load_checkpoint(directory, tag=tag, **options)
        return loaded is not None


class _OwnEngine(EngineView):
    """Reads our engine by its parts."""

    engine: Engine

    def check(self) -> None:
        """Accept every engine of ours."""

    @property
    def micro_batch_size(self) -> int:
        return self.engine.batch.micro

    @property
    def accumulation_steps(self) -> int:
        return self.engine.batch.accumulation_steps

    @property
    def micro_steps(self) -> int:
        return self.engine.progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        return self.engine.progress.skipped_steps

    def check_calls(self, *, once_a_batch: bool) -> None:
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
        return bool(getattr(type(self.engine), "is_pipe_parallel", False))

    def make_mpu(self) -> ModelParallelUnit | None:
        mesh = self.engine.mesh
        spread = mesh.all_ranks is not None and mesh.pipe.size * mesh.tensor.size > 1
        return make_mesh_mpu(mesh, pipeline=self.is_pipeline) if spread else None

    @property
    def forward_is_collective(self) -> bool:
        mesh = self.engine.mesh
        spread = mesh.pipe.size * mesh.tensor.size > 1
        return spread or self.is_pipeline or self.engine.config.zero_optimization.stage >= 3

    @cached_property
    def _readers(self) -> list[tuple[str, Callable[[], Any]]]:
        engine = self.engine
        return [
            ("learning_rate", lambda: engine.optimizer.param_groups[0]["lr"]),
            ("grad_norm", lambda: engine.progress.grad_norm),
            ("loss_scale", lambda: engine.scaler.scale),
            ("skipped_steps", lambda: engine.progress.skipped_steps),
        ]

    def numbers(self) -> dict[str, float]:
        return {**super().numbers(), **self.engine.observer.measured}

    def timed_input(self, batches: Iterator[Any]) -> Iterator[Any]:
        observer = self.engine.observer
        return _TimedInput(batches, observer) if observer.times_phases else batches

    def save(self, directory: str, tag: str) -> None:
        if hasattr(type(self.engine), "save_checkpoint"):
            super().save(directory, tag)  # an extension may write more
        else:
            self.engine.checkpoint.save(directory, tag)

    def load(self, directory: str, tag: str, *, module_only: bool) -> bool:
        self.engine.checkpoint.load(directory, tag, module_only=module_only)
        return True

    @property
    def saves_in_background(self) -> bool:
        return self.engine.config.checkpoint.writer.decoupled

    @property
    def checkpoint_written(self) -> bool:
        return self.engine.checkpoint.is_written

    def wait_for_checkpoint(self) -> None:
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


def _first(rates: Any) -> Any:
    if isinstance(rates, list | tuple):
        return rates[0] if rates else None
    return rates


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number
