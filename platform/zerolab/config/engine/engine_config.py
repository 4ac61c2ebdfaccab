"""Configuration of the engine: DeepSpeed's JSON keys, typed and checked."""

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
from zerolab.config.engine.runtime import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    CheckpointConfig,
    CommsLoggerConfig,
    CompileConfig,
    DataTypesConfig,
    DType,
    FlopsProfilerConfig,
    Fp16Config,
    MonitorConfig,
    TimersConfig,
)
from zerolab.config.engine.schedules import SchedulerConfig
from zerolab.config.engine.zero import ZeroConfig
from zerolab.errors import ConfigError
from zerolab.schema.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section, hint

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """Content of an engine file; attributes are named as its keys.

    The file has DeepSpeed's JSON format; :func:`load_engine_config` reads it.

    Example:
        >>> config = zerolab.config.load_engine_config({"train_batch_size": 8})
        >>> config.gradient_clipping
        0.0
    """

    train_batch_size: PositiveInt | None = None
    """Samples in one optimizer step, over all data-parallel ranks."""

    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples in one forward pass on one rank."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches in one optimizer step."""

    managed_gradient_accumulation: bool = True
    """``false``: every ``engine.step()`` updates the weights with the gradients summed since the
    last step; losses are still divided by the accumulation steps."""

    optimizer: OptimizerConfig | None = None
    """Optimizer, if none is passed to ``initialize()``."""

    scheduler: SchedulerConfig | None = None
    """Learning-rate schedule, if none is passed to ``initialize()``."""

    gradient_clipping: NonNegativeFloat = 0.0
    """Largest L2 norm of the whole gradient; 0 turns clipping off."""

    prescale_gradients: bool = False
    """Divide gradients by the ranks before they are reduced, not after (stages 0 to 2)."""

    gradient_predivide_factor: PositiveFloat = 1.0
    """Divide gradients by this before they are reduced, and by ranks / this after (stages 0 to
    2)."""

    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Average or sum the gradients of the ranks."""

    communication_data_type: DType | None = None
    """Type in which gradients are communicated; null means the type in which they accumulate."""

    fp16: Fp16Config = Fp16Config()
    """16-bit floats with loss scaling."""

    bf16: Bf16Config = Bf16Config()
    """bfloat16."""

    data_types: DataTypesConfig = DataTypesConfig()
    """Types of stored tensors."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """Sharding of the training state over the data-parallel ranks."""

    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Tensor parallelism: sharding of matrices over ranks that share one model."""

    sequence_parallel_size: PositiveInt = 1
    """Ranks that divide the tokens of each sample; the data-parallel size is the number of all
    ranks divided by this."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recompute activations in backward instead of keeping them."""

    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline parallelism: execution of a model with pipeline stages."""

    compile: CompileConfig = CompileConfig()
    """``torch.compile`` on the model."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading."""

    dataloader_drop_last: bool = False
    """Drop a last micro-batch that is not full, in the loader that ``initialize()`` builds."""

    steps_per_print: PositiveInt | None = None
    """Print a line of progress every N optimizer steps: loss, rates, momentum, speed; null prints
    none."""

    wall_clock_breakdown: bool = False
    """Time input, forward, backward, communication and update, and print their shares with each
    line of progress: every 10 optimizer steps unless ``steps_per_print`` says otherwise."""

    memory_breakdown: bool = False
    """Print the allocated bytes, by kind, after the first step and with each line of progress."""

    dump_state: bool = False
    """Print the resolved configuration when the engine is built."""

    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """A table of the floating-point operations of one step."""

    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Log of the elements that collectives move."""

    timers: TimersConfig = TimersConfig()
    """DeepSpeed's timers."""

    aio: AioConfig = AioConfig()
    """DeepSpeed's settings for reading and writing offloaded files."""

    tensorboard: MonitorConfig = MonitorConfig()
    """Numbers of each step, for TensorBoard."""

    csv_monitor: MonitorConfig = MonitorConfig()
    """Numbers of each step, in CSV files."""

    zero_allow_untested_optimizer: bool = hint(
        False,
        "any optimizer may be used, and one that cannot be sharded is an error",
    )
    """Allow optimizers outside DeepSpeed's list."""

    zero_force_ds_cpu_optimizer: bool = hint(
        True, "any optimizer may be offloaded; torch's own runs on the CPU"
    )
    """Require DeepSpeed's CPU optimizer when offloading."""

    vocabulary_size: PositiveInt | None = hint(None, "it only ever caused a warning")
    """Warn about vocabularies that are no multiple of 8."""

    log_level: str | None = hint(None, "configure Python's logging instead")
    """Level of DeepSpeed's log."""

    _source: str = PrivateAttr(default="engine config")
    _overridden: frozenset[str] = PrivateAttr(default=frozenset())
    _off: tuple[str, ...] = PrivateAttr(default=())
    _auto: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def dtype(self) -> DType:
        """Return the type in which the model computes."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else "fp32"

    def sums_micro_batches(self, accumulation_steps: int) -> bool:
        """Return whether an update may use more than one micro-batch.

        Args:
            accumulation_steps: From :meth:`batch_sizes`.
        """
        return accumulation_steps > 1 or not self.managed_gradient_accumulation

    def with_origin(
        self,
        source: str,
        overridden: frozenset[str],
        off: tuple[str, ...],
        auto: Mapping[str, str],
    ) -> "EngineConfig":
        """Return a copy that records the source of its values.

        Args:
            source: The file's name, for messages.
            overridden: Dotted keys of overrides.
            off: Dotted unsupported keys of DeepSpeed that the file turns off.
            auto: Dotted keys that were ``"auto"``, and the origin of each value.
        """
        copy = self.model_copy()
        origin = (source, overridden, off)
        copy._source, copy._overridden, copy._off = origin  # noqa: SLF001 - a copy of self
        copy._auto = dict(auto)  # noqa: SLF001 - as above
        return copy

    @property
    def source(self) -> str:
        """Name of the file, for messages."""
        return self._source

    @property
    def overridden(self) -> frozenset[str]:
        """Dotted keys of overrides."""
        return self._overridden

    @property
    def off(self) -> tuple[str, ...]:
        """Dotted unsupported keys of DeepSpeed that the file turns off."""
        return self._off

    @property
    def auto(self) -> Mapping[str, str]:
        """Dotted keys that were ``"auto"``, and the origin of each value."""
        return self._auto

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _switched_off(cls, value: Any) -> Any:
        return {} if value is False else value

    def data_parallel_size(self, world_size: int) -> int:
        """Divide the world size by the ranks that share one model.

        Args:
            world_size: All ranks.

        Returns:
            Number of data-parallel ranks.

        Raises:
            ConfigError: If it is not divisible.

        Example:
            >>> content = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}
            >>> zerolab.config.load_engine_config(content).data_parallel_size(4)
            2
        """
        problem = self.layout_problem(world_size)
        if problem is not None:
            raise ConfigError(self._source, [problem])
        return world_size // self.model_parallel_size

    @property
    def engine_parts(self) -> dict[str, str]:
        """Keys that extensions provide, and the extension of each."""
        zero = self.zero_optimization
        optimizer, param = zero.offload_optimizer.device, zero.offload_param.device
        recompute = self.activation_checkpointing
        keys = {
            "cpu_optimizer": {"zero_optimization.offload_optimizer.device": optimizer == "cpu"},
            "nvme_optimizer": {"zero_optimization.offload_optimizer.device": optimizer == "nvme"},
            "nvme_parameters": {"zero_optimization.offload_param.device": param == "nvme"},
            "all_reduce": {"zero_optimization.reduce_scatter": not zero.reduce_scatter},
            "activation_storage": {
                "activation_checkpointing.cpu_checkpointing": recompute.active
                and recompute.cpu_checkpointing,
            },
            "tensor_parallel": {"tensor_parallel.size": self.tensor_parallel.size > 1},
            "sequence_parallel": {"sequence_parallel_size": self.sequence_parallel_size > 1},
            "pipeline": {"pipeline.stages": (self.pipeline.stages or 1) > 1},
            "profiler": {
                "steps_per_print": self.steps_per_print is not None,
                "wall_clock_breakdown": self.wall_clock_breakdown,
                "memory_breakdown": self.memory_breakdown,
                "flops_profiler.enabled": self.flops_profiler.enabled,
                "comms_logger.enabled": self.comms_logger.enabled,
                "tensorboard.enabled": self.tensorboard.enabled,
                "csv_monitor.enabled": self.csv_monitor.enabled,
            },
        }
        return {key: name for name, used in keys.items() for key in used if used[key]}

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one model, according to the file."""
        return self.tensor_parallel.size * (self.pipeline.stages or 1) * self.sequence_parallel_size

    def layout_problem(self, world_size: int) -> str | None:
        """Return why a number of ranks cannot be laid out.

        Returns:
            One line, or None without a problem.
        """
        size, shard = self.model_parallel_size, self.zero_optimization.shard_ranks
        sequence = self.sequence_parallel_size
        conflicts = {
            "tensor_parallel.size": self.tensor_parallel.size > 1,
            "pipeline.stages": (self.pipeline.stages or 1) > 1,
            "zero_optimization.mics_shard_size": shard is not None,
        }
        if sequence > 1 and (others := [key for key, used in conflicts.items() if used]):
            return f"sequence_parallel_size: must be 1 with {', '.join(others)}, got {sequence}"
        if world_size % size:
            sizes = {
                "pipeline.stages": self.pipeline.stages,
                "tensor_parallel.size": self.tensor_parallel.size,
                "sequence_parallel_size": self.sequence_parallel_size,
            }
            divided = {key: value for key, value in sizes.items() if value and value > 1}
            product = " x ".join(str(value) for value in divided.values())
            keys = " x ".join(divided)
            return f"{keys}: must divide the number of ranks, {world_size}, got {product}"
        if shard is not None and world_size // size % shard:
            ranks = f"must divide the number of data-parallel ranks, {world_size // size}"
            return f"zero_optimization.mics_shard_size: {ranks}, got {shard}"
        return None

    def batch_sizes(self, dp_world_size: int) -> BatchSizes:
        """Derive the batch sizes that the file leaves out.

        Args:
            dp_world_size: Number of data-parallel ranks.

        Returns:
            All three sizes, consistent with each other.

        Raises:
            ConfigError: If both the train and the micro-batch size are missing, or they disagree.

        Example:
            >>> content = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
            >>> zerolab.config.load_engine_config(content).batch_sizes(dp_world_size=4)
            BatchSizes(train=32, micro=4, accumulation_steps=2, dp_world_size=4)
        """
        sizes = self._sizes(dp_world_size)
        if isinstance(sizes, str):
            raise ConfigError(self._source, [sizes])
        return sizes

    def batch_problem(self, dp_world_size: int) -> str | None:
        """Return the problem of the batch sizes with some data-parallel ranks.

        Returns:
            One line, or None without a problem.
        """
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
