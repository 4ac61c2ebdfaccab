"""The engine's configuration: DeepSpeed's JSON keys, typed, checked, with nothing ignored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from pydantic import PrivateAttr

from zerolab.config.engine import optimizers, schedules
from zerolab.config.engine.auto import fill_auto
from zerolab.config.engine.batch import BatchSizes, resolve_batch_sizes
from zerolab.config.engine.merge import overwrite_deepspeed_config
from zerolab.config.engine.optimizers import OptimizerConfig
from zerolab.config.engine.precision import Bf16Config, DataTypesConfig, DType, Fp16Config
from zerolab.config.engine.refused import REFUSED, without_aliases
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
from zerolab.config.files import as_mapping
from zerolab.config.plain import plain_problems
from zerolab.config.refusing import take_refused
from zerolab.errors import ConfigError
from zerolab.schema.hints import hint
from zerolab.schema.section import (
    NonNegativeFloat,
    Path,
    PositiveFloat,
    PositiveInt,
    Section,
    dotted,
    validate,
    without_nulls,
)

__all__ = ["EngineConfig", "EngineFile", "load_engine_config", "parse_engine_config"]


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

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recompute activations in backward instead of keeping them."""

    compile: CompileConfig = CompileConfig()
    """``torch.compile`` on the model."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading."""

    dataloader_drop_last: bool = False
    """Drop a last micro-batch that is not full, in the loader that ``initialize()`` builds."""

    steps_per_print: PositiveInt | None = None
    """Print a line of progress every so many optimizer steps; null prints none."""

    wall_clock_breakdown: bool = False
    """Time forward, backward, reduction and update, and print their shares with each line of
    progress: every 10 optimizer steps unless ``steps_per_print`` says otherwise."""

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
        self, source: str, overridden: frozenset[str], off: tuple[str, ...]
    ) -> "EngineConfig":
        """Remember where the values came from.

        Args:
            source: The file's name, for messages.
            overridden: Dotted keys that an override gave.
            off: Dotted keys of DeepSpeed that the file turns off, and that do not exist here.
        """
        copy = self.model_copy()
        mine = (source, overridden, off)
        copy._source, copy._overridden, copy._off = mine  # noqa: SLF001 - a copy of self
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
        return resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            dp_world_size,
        )


_OPAQUE = frozenset({"optimizer.params", "scheduler.params"})
"""Blocks that are checked by the optimizer's or schedule's own rules."""


@dataclass(frozen=True)
class EngineFile:
    """What reading an engine file gave: the configuration, or as much of it as could be saved."""

    config: EngineConfig | None
    problems: list[str]
    bad: frozenset[str]
    """Dotted keys that were wrong; they stand at their defaults in ``config``."""
    prefix: str = ""
    """What problems of this file begin with."""


def load_engine_config(
    source: str | PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Read and check an engine configuration.

    Args:
        source: Path of a JSON file, or its content.
        overrides: Laid over the file by :func:`overwrite_deepspeed_config`.
        hyperparameters: Where values that say ``"auto"`` are looked up.

    Returns:
        The configuration, whole and consistent for any number of ranks;
        :meth:`EngineConfig.batch_sizes` needs that number.

    Raises:
        ConfigError: With every problem of the file.
    """
    name = "engine config" if isinstance(source, Mapping) else str(source)
    parsed = parse_engine_config(as_mapping(source), name, overrides, hyperparameters)
    if parsed.problems or parsed.config is None:
        raise ConfigError(name, parsed.problems)
    return parsed.config


def parse_engine_config(
    content: Mapping[str, Any],
    source: str,
    overrides: Mapping[str, Any] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> EngineFile:
    """Check an engine configuration and go on after its mistakes.

    Args:
        content: The file.
        source: Its name, for messages.
        overrides: Laid over the file.
        hyperparameters: Where values that say ``"auto"`` are looked up.
    """
    unfit = plain_problems(content)
    if unfit:
        return EngineFile(None, unfit, frozenset())
    merged = overwrite_deepspeed_config(content, overrides or {})
    filled, problems = fill_auto(merged, hyperparameters or {})
    without_value = frozenset(problem.partition(": ")[0] for problem in problems)
    renamed, twice = without_aliases(filled)
    rest, refused, off = take_refused(renamed, REFUSED, _OPAQUE)
    config, wrong, paths = validate(EngineConfig, without_nulls(rest, ()))
    problems += [*twice, *refused, *wrong]
    bad = frozenset(dotted(path) for path in paths) | without_value
    if config is None:
        return EngineFile(None, problems, bad)
    config = _canonical(config)
    told = {problem.partition(": ")[0] for problem in problems}
    for keys, problem in _checks(config):
        known = problem.partition(": ")[0] in told
        if not known and not any(_touches(key, bad) for key in keys):
            problems.append(problem)
    overridden = frozenset(dotted(path) for path in _leaves(overrides or {}))
    return EngineFile(config.with_origin(source, overridden, tuple(off)), problems, bad)


def _touches(key: str, bad: frozenset[str]) -> bool:
    return any(key == wrong or wrong.startswith(f"{key}.") for wrong in bad)


def _leaves(data: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _canonical(config: EngineConfig) -> EngineConfig:
    """Write the names of optimizer and schedule in their usual spelling."""
    update: dict[str, Section] = {}
    if config.optimizer is not None:
        name = optimizers.canonical_optimizer(config.optimizer.type)
        update["optimizer"] = config.optimizer.model_copy(update={"type": name})
    if config.scheduler is not None:
        name = schedules.canonical_schedule(config.scheduler.type)
        update["scheduler"] = config.scheduler.model_copy(update={"type": name})
    return config.model_copy(update=update) if update else config


def _checks(config: EngineConfig) -> Iterator[tuple[list[str], str]]:
    """Rules between keys: the keys that each one reads, and its problem."""
    zero = config.zero_optimization
    stage = "zero_optimization.stage"
    if config.fp16.enabled and config.bf16.enabled:
        yield (
            ["fp16.enabled", "bf16.enabled"],
            "fp16.enabled: must be false where bf16.enabled is true, got true for both; "
            "keep one of the two",
        )
    declared = config.data_types.param_dtype
    if declared is not None and declared != config.dtype:
        yield (
            ["data_types.param_dtype", "fp16.enabled", "bf16.enabled"],
            f"data_types.param_dtype: must be {config.dtype!r}, which fp16 and bf16 say, "
            f"got {declared!r}; remove it",
        )
    divided = config.gradient_predivide_factor != 1.0
    if config.gradient_allreduce_op == "sum" and (divided or config.prescale_gradients):
        yield (
            ["gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"],
            "gradient_allreduce_op: must be 'mean' where prescale_gradients or "
            "gradient_predivide_factor divides gradients, got 'sum'; keep one of the two",
        )
    elif divided and config.prescale_gradients:
        yield (
            ["prescale_gradients", "gradient_predivide_factor"],
            "gradient_predivide_factor: must be 1 where prescale_gradients divides by the ranks, "
            f"got {config.gradient_predivide_factor}; keep one of the two",
        )
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if optimizer.device != "none" and zero.stage == 0:
        yield (
            [stage, "zero_optimization.offload_optimizer"],
            "zero_optimization.offload_optimizer.device: must be 'none' at stage 0, "
            f"got {optimizer.device!r}; set zero_optimization.stage to 1, 2 or 3",
        )
    if param.device != "none" and zero.stage != 3:
        yield (
            [stage, "zero_optimization.offload_param"],
            f"zero_optimization.offload_param.device: must be 'none' at stage {zero.stage}, "
            f"got {param.device!r}; set zero_optimization.stage to 3",
        )
    if optimizer.device == "nvme" and not optimizer.nvme_path:
        yield (
            ["zero_optimization.offload_optimizer"],
            "zero_optimization.offload_optimizer.nvme_path: is required for device 'nvme', "
            "got nothing; name a directory on a fast disk",
        )
    if optimizer.ratio != 1.0:
        yield (
            ["zero_optimization.offload_optimizer"],
            "zero_optimization.offload_optimizer.ratio: must be 1 (all states are offloaded, "
            f"or none), got {optimizer.ratio}",
        )
    if config.optimizer is not None:
        for problem in optimizers.problems_of(config.optimizer):
            yield ["optimizer"], problem
    if config.scheduler is not None:
        for problem in schedules.problems_of(config.scheduler):
            yield ["scheduler"], problem
