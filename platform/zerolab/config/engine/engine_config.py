"""The engine's configuration: DeepSpeed's JSON keys, typed, checked, with nothing ignored."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PrivateAttr, field_validator

from zerolab.config.engine.batch import (
    BatchSizes,
    keep_batch,
    planned_size,
    resolve_batch_sizes,
)
from zerolab.config.engine.optimizers import OptimizerConfig
from zerolab.config.engine.parallel import PipelineConfig, TensorParallelConfig
from zerolab.config.engine.precision import Bf16Config, DataTypesConfig, DType, Fp16Config
from zerolab.config.engine.runtime import (
    ActivationCheckpointingConfig,
    AioConfig,
    CheckpointConfig,
    CommsLoggerConfig,
    CompileConfig,
    FlopsProfilerConfig,
    MonitorConfig,
    TimersConfig,
)
from zerolab.config.engine.schedules import SchedulerConfig
from zerolab.config.engine.zero import ZeroConfig
from zerolab.errors import ConfigError
from zerolab.schema.hints import hint
from zerolab.schema.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """A DeepSpeed-style JSON file; attributes are named as its keys."""

    train_batch_size: PositiveInt | None = None
    """Samples in one optimizer step, over all data-parallel ranks."""

    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples in one forward pass on one rank."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches in one optimizer step."""

    managed_gradient_accumulation: bool = True
    """``false``: every ``engine.step()`` updates the weights, with what the ``backward()`` calls
    since the last one have summed; losses are divided by the accumulation steps all the same."""

    optimizer: OptimizerConfig | None = None
    """Which optimizer updates the weights, when none is passed to ``initialize()``."""

    scheduler: SchedulerConfig | None = None
    """How the learning rate changes, when no schedule is passed to ``initialize()``."""

    gradient_clipping: NonNegativeFloat = 0.0
    """Largest L2 norm of the whole gradient; 0 turns clipping off."""

    prescale_gradients: bool = False
    """Divide gradients by the ranks before they are reduced, not after (stages 0 to 2)."""

    gradient_predivide_factor: PositiveFloat = 1.0
    """Divide gradients by this before they are reduced, and by ranks / this after (stages 0 to
    2)."""

    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Whether the gradients of the ranks are averaged or summed."""

    communication_data_type: DType | None = None
    """Type in which gradients travel; null means the type they accumulate in."""

    fp16: Fp16Config = Fp16Config()
    """16-bit floats with loss scaling."""

    bf16: Bf16Config = Bf16Config()
    """bfloat16."""

    data_types: DataTypesConfig = DataTypesConfig()
    """Types of what the engine keeps."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """How training state is divided between the data-parallel ranks."""

    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """How matrices are cut over ranks that have one model between them."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recompute activations in backward instead of keeping them."""

    pipeline: PipelineConfig = PipelineConfig()
    """How a model that is cut into pipeline stages runs."""

    compile: CompileConfig = CompileConfig()
    """``torch.compile`` on the model."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading."""

    dataloader_drop_last: bool = False
    """Drop a last micro-batch that is not full, in the loader that ``initialize()`` builds."""

    steps_per_print: PositiveInt | None = None
    """Print a line of progress every so many optimizer steps: loss, rates, momentum, speed; null
    prints none."""

    wall_clock_breakdown: bool = False
    """Time input, forward, backward, communication and update, and print their shares with each
    line of progress: every 10 optimizer steps unless ``steps_per_print`` says otherwise."""

    memory_breakdown: bool = False
    """Print the bytes held, by kind, after the first step and with each line of progress."""

    dump_state: bool = False
    """Print the resolved configuration when the engine is built."""

    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """A table of the floating-point operations of one step."""

    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """What collectives move."""

    timers: TimersConfig = TimersConfig()
    """DeepSpeed's timers."""

    aio: AioConfig = AioConfig()
    """How DeepSpeed reads and writes offloaded files."""

    tensorboard: MonitorConfig = MonitorConfig()
    """Numbers of each step, for TensorBoard."""

    csv_monitor: MonitorConfig = MonitorConfig()
    """Numbers of each step, in CSV files."""

    zero_allow_untested_optimizer: bool = hint(
        default=False, reason="any optimizer may be used, and one that cannot be sharded says so"
    )
    """Allow optimizers outside DeepSpeed's list."""

    zero_force_ds_cpu_optimizer: bool = hint(
        default=True, reason="any optimizer may be offloaded; torch's own runs on the CPU"
    )
    """Insist on DeepSpeed's CPU optimizer when offloading."""

    vocabulary_size: PositiveInt | None = hint(None, "it only ever caused a warning")
    """Warn about vocabularies that are no multiple of 8."""

    log_level: str | None = hint(None, "Python's logging decides what is shown")
    """Level of DeepSpeed's log."""

    _source: str = PrivateAttr(default="engine config")
    _overridden: frozenset[str] = PrivateAttr(default=frozenset())
    _off: tuple[str, ...] = PrivateAttr(default=())
    _auto: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def dtype(self) -> DType:
        """The type that the model computes in."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else "fp32"

    def sums_micro_batches(self, accumulation_steps: int) -> bool:
        """Whether an update may be made from more than one micro-batch.

        Args:
            accumulation_steps: As :meth:`batch_sizes` gives them.
        """
        return accumulation_steps > 1 or not self.managed_gradient_accumulation

    def with_origin(
        self,
        source: str,
        overridden: frozenset[str],
        off: tuple[str, ...],
        auto: Mapping[str, str],
    ) -> "EngineConfig":
        """Remember where the values came from.

        Args:
            source: The file's name, for messages.
            overridden: Dotted keys that an override gave.
            off: Dotted keys of DeepSpeed that the file turns off, and that do not exist here.
            auto: Dotted keys that said ``"auto"``, and what determined each.
        """
        copy = self.model_copy()
        mine = (source, overridden, off)
        copy._source, copy._overridden, copy._off = mine  # noqa: SLF001 - a copy of self
        copy._auto = dict(auto)  # noqa: SLF001 - as above
        return copy

    @property
    def source(self) -> str:
        """Name of the file, for messages."""
        return self._source

    @property
    def overridden(self) -> frozenset[str]:
        """Dotted keys that an override gave."""
        return self._overridden

    @property
    def off(self) -> tuple[str, ...]:
        """Dotted keys of DeepSpeed that the file turns off, and that do not exist here."""
        return self._off

    @property
    def auto(self) -> Mapping[str, str]:
        """Dotted keys that said ``"auto"``, and what determined each."""
        return self._auto

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _switched_off(cls, value: Any) -> Any:
        return {} if value is False else value

    def data_parallel_size(self, world_size: int) -> int:
        """Divide all ranks by those that have one model between them.

        Args:
            world_size: All ranks.

        Raises:
            ConfigError: If there is a rest.
        """
        problem = self.layout_problem(world_size)
        if problem is not None:
            raise ConfigError(self._source, [problem])
        return world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that have one model between them, as far as the file tells."""
        return self.tensor_parallel.size * (self.pipeline.stages or 1)

    def layout_problem(self, world_size: int) -> str | None:
        """What stands in the way of laying so many ranks out, in one line."""
        size, shard = self.model_parallel_size, self.zero_optimization.shard_ranks
        if world_size % size:
            sizes = {
                "pipeline.stages": self.pipeline.stages,
                "tensor_parallel.size": self.tensor_parallel.size,
            }
            divided = {key: value for key, value in sizes.items() if value and value > 1}
            found = " x ".join(str(value) for value in divided.values())
            return (
                f"{' x '.join(divided)}: must divide the number of ranks, {world_size}, got {found}"
            )
        if shard is not None and world_size // size % shard:
            ranks = f"must divide the number of data-parallel ranks, {world_size // size}"
            return f"zero_optimization.mics_shard_size: {ranks}, got {shard}"
        return None

    def batch_sizes(self, dp_world_size: int) -> BatchSizes:
        """Fill in whichever of the three batch sizes the file leaves out.

        Args:
            dp_world_size: Number of data-parallel ranks.

        Returns:
            All three sizes, consistent with each other.

        Raises:
            ConfigError: If both the train and the micro-batch size are missing, or they disagree.
        """
        sizes = self._sizes(dp_world_size)
        if isinstance(sizes, str):
            raise ConfigError(self._source, [sizes])
        return sizes

    def batch_problem(self, dp_world_size: int) -> str | None:
        """What is wrong with the batch sizes for so many data-parallel ranks, in one line."""
        sizes = self._sizes(dp_world_size)
        return sizes if isinstance(sizes, str) else None

    def _sizes(self, dp_world_size: int) -> BatchSizes | str:
        planned = planned_size(dp_world_size)
        sizes = resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            planned,
        )
        if isinstance(sizes, str) or planned == dp_world_size:
            return sizes
        return keep_batch(sizes, dp_world_size)
