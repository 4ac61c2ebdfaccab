"""Smaller blocks of the engine file: precision, memory, checkpoints, compilation, profiling."""

from typing import Any, Literal

from pydantic import Field, field_validator

from zerolab.schema.section import Int, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, hint

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Bf16Config",
    "CheckpointConfig",
    "CommsLoggerConfig",
    "CompileConfig",
    "DType",
    "DataTypesConfig",
    "FlopsProfilerConfig",
    "Fp16Config",
    "MonitorConfig",
    "TimersConfig",
]

_FILES = "files are read and written by threads of the engine"


class ActivationCheckpointingConfig(Section):
    """Recompute activations in backward instead of keeping them."""

    enabled: bool | None = None
    """Checkpoint every block of the model; null means yes when ``cpu_checkpointing``,
    ``partition_activations`` or ``number_checkpoints`` is set."""

    cpu_checkpointing: bool = False
    """Keep the saved inputs of blocks in host memory."""

    partition_activations: bool = False
    """Keep on each tensor-parallel rank only its part of the saved inputs of blocks, and gather
    them for backward. It has no effect without ``tensor_parallel``, or with a plan that already
    divides them along the tokens."""

    number_checkpoints: PositiveInt | None = hint(None, "every block is one checkpoint")
    """Number of checkpoints in the model."""

    contiguous_memory_optimization: bool = hint(False, "torch's allocator keeps the saved inputs")
    """Copy saved inputs into one buffer."""

    synchronize_checkpoint_boundary: bool = hint(False, "no boundary needs the device to be idle")
    """Wait for the device at each block."""

    profile: bool = hint(False, "wall_clock_breakdown times the phases of a step")
    """Time each block."""

    @property
    def active(self) -> bool:
        """Return whether blocks are checkpointed."""
        if self.enabled is not None:
            return self.enabled
        is_requested = self.cpu_checkpointing or self.partition_activations
        return is_requested or self.number_checkpoints is not None


class AioConfig(Section):
    """DeepSpeed's settings for reading and writing offloaded files."""

    block_size: PositiveInt = hint(1_048_576, _FILES)
    """Bytes in one request."""

    queue_depth: PositiveInt = hint(8, _FILES)
    """Requests in flight."""

    intra_op_parallelism: PositiveInt = hint(1, _FILES)
    """Threads for one request."""

    thread_count: PositiveInt = hint(1, _FILES)
    """Threads for one request (old name)."""

    single_submit: bool = hint(False, _FILES)
    """Submit requests one by one."""

    overlap_events: bool = hint(True, _FILES)
    """Submit and wait at the same time."""

    use_gds: bool = hint(False, _FILES)
    """Copy between files and GPU directly."""


class WriterConfig(Section):
    """Settings for writing checkpoint files."""

    decoupled: bool = False
    """Continue training while a checkpoint is written."""

    type: Literal["mock", "python", "fast"] = hint("python", "there is one writer")
    """Type of DeepSpeed's writer."""

    io_buffer_size: PositiveInt = hint(67_108_864, "there is one writer")
    """Bytes in one buffer."""

    io_buffer_double: bool = hint(True, "there is one writer")
    """Two buffers."""

    show_statistics: bool = hint(False, "there is one writer")
    """Print rates."""

    data_parallel: Literal["replica", "socket", "machine"] | None = hint(
        None, "every rank writes its own shards"
    )
    """Ranks that write."""

    io_multiplier: PositiveInt = hint(1, "there is one writer")
    """Ranks that write, times this."""


class ParallelWriteConfig(Section):
    """Ranks that write a checkpoint."""

    pipeline_stage: bool = hint(False, "every rank writes its own shards")
    """Spread files of a pipeline stage over ranks."""


class CheckpointConfig(Section):
    """Saving and loading."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = "Warn"
    """Reaction to different tags on the ranks."""

    writer: WriterConfig = WriterConfig()
    """Settings for writing files."""

    load_universal: bool = hint(False, "every checkpoint loads at any stage and world size")
    """Load DeepSpeed's universal layout."""

    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    """Ranks that write."""

    checkpoint_serialization: bool = hint(True, "tensors are saved as safetensors")
    """Serialize with torch."""

    @field_validator("tag_validation", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.capitalize() if isinstance(value, str) else value


class CommsLoggerConfig(Section):
    """Log of the elements that collectives move."""

    enabled: bool = False
    """Write the elements that this rank's collectives moved in a step, with each line of progress:
    every 10 optimizer steps unless ``steps_per_print`` says otherwise."""

    prof_all: bool = True
    """All collectives."""

    prof_ops: list[str] = Field(default_factory=list)
    """Collectives to log if ``prof_all`` is false: ``all_reduce``, ``reduce_scatter``,
    ``all_gather``."""

    verbose: bool = hint(False, "collectives are counted, not logged one by one")
    """Print each."""

    debug: bool = hint(False, "collectives are counted, not logged one by one")
    """Print the caller."""


class ThroughputTimerConfig(Section):
    """DeepSpeed's throughput timer."""

    enabled: bool = True
    """``false`` leaves samples, tokens and FLOP/s out of the line of ``steps_per_print``."""

    synchronized: bool = hint(True, "the device is only synchronized for lines that are printed")
    """Wait for the device before reading the clock."""


class TimersConfig(Section):
    """DeepSpeed's timers."""

    throughput: ThroughputTimerConfig = ThroughputTimerConfig()
    """Throughput."""


class FlopsProfilerConfig(Section):
    """A table of the floating-point operations of one step."""

    enabled: bool = False
    """Profile a step and print the table."""

    profile_step: PositiveInt = 1
    """Optimizer step to profile, counted from 1."""

    module_depth: Int = -1
    """Depth of modules shown; -1 means all."""

    top_modules: PositiveInt = 1
    """Modules shown at each depth, largest first."""

    detailed: bool = True
    """Show the module tree as well as the summary."""

    output_file: str | None = None
    """Write the table here instead of printing it."""

    recompute_fwd_factor: NonNegativeFloat = 0.0
    """Share of the forward pass that backward recomputes, counted in addition."""


class CompileConfig(Section):
    """``torch.compile`` on the model."""

    enabled: bool = False
    """Compile the model."""

    backend: str = "inductor"
    """As in ``torch.compile``."""

    mode: str | None = None
    """As in ``torch.compile``."""

    fullgraph: bool = False
    """As in ``torch.compile``."""

    dynamic: bool | None = None
    """As in ``torch.compile``."""


class MonitorConfig(Section):
    """Files in which rank 0 records the numbers of each optimizer step."""

    enabled: bool = False
    """Write learning rate, gradient norm and, in fp16, loss scale, over the samples trained."""

    output_path: str = ""
    """Directory of the files; ``runs`` (TensorBoard) or ``csv_monitor`` in the working directory
    by default."""

    job_name: str = "DeepSpeedJobName"
    """Folder inside it."""


DType = Literal["fp32", "fp16", "bf16"]


class Fp16Config(Section):
    """16-bit floats with loss scaling."""

    enabled: bool = False
    """Train in fp16, with fp32 master weights."""

    auto_cast: bool = hint(False, "floating-point inputs of the model are always cast to its dtype")
    """Cast inputs to fp16."""

    loss_scale: NonNegativeFloat = 0.0
    """A fixed loss scale; 0 means a dynamic one."""

    initial_scale_power: NonNegativeInt = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: PositiveInt = 1000
    """Clean optimizer steps after which the scale doubles."""

    hysteresis: PositiveInt = 2
    """Overflows that are tolerated before the scale is halved."""

    consecutive_hysteresis: bool = False
    """A clean step restores the tolerance."""

    min_loss_scale: PositiveInt = 1
    """The dynamic scale never falls below this."""


class Bf16Config(Section):
    """bfloat16, which needs no loss scaling."""

    enabled: bool = False
    """Train in bf16, with fp32 master weights."""

    immediate_grad_update: bool = hint(
        False, "gradients are accumulated as soon as backward produces them"
    )
    """Accumulate each gradient at once."""

    check_grad_overflow: bool = hint(
        True, "a gradient that is not finite is always dropped and counted"
    )
    """Skip a step whose gradient is not finite."""


class DataTypesConfig(Section):
    """Types of stored tensors."""

    grad_accum_dtype: DType | None = None
    """Type in which gradients are summed over micro-batches; null means fp32."""

    param_dtype: DType | None = None
    """Must be the type that ``fp16`` or ``bf16`` chooses; it is derived from them."""
