"""Reader of engine files: overrides, normalization, strict checks that report all problems."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from zerolab.config.engine import optimizers, schedules
from zerolab.config.engine.dialect import Dialect, ResolvedAuto, dialect, log_changes, read_source
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.merging import merge
from zerolab.errors import ConfigError
from zerolab.registry import PARTS, Registry
from zerolab.schema.json_values import to_json_values
from zerolab.schema.section import Path, Section, dotted, drop_nulls, hints_of, validate

__all__ = [
    "EngineFile",
    "load_engine_config",
    "overwrite_deepspeed_config",
    "parse_engine_config",
]

_OPAQUE = frozenset({"optimizer.params", "scheduler.params"})
"""Blocks that are checked by the optimizer's or schedule's own rules."""


@dataclass(frozen=True)
class EngineFile:
    """Result of reading an engine file, with as much of the configuration as is valid."""

    config: EngineConfig | None
    problems: list[str]
    bad: frozenset[str]
    """Dotted keys with errors; they have their defaults in ``config``."""
    changes: list[str] = field(default_factory=list)
    """Changes of normalization, one line each."""
    prefix: str = ""
    """Prefix of this file's problems."""
    left_open: list[str] = field(default_factory=list)
    """Problems that a script's arguments may solve: ``"auto"`` keys without a value in the
    experiment."""


def load_engine_config(
    source: str | PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Read and check an engine configuration, including the forms of public files.

    Other forms are normalized first, with a line in the log (``zerolab.config``) for each change.

    Args:
        source: Path of a JSON file, or its content.
        overrides: Merged into the file by :func:`overwrite_deepspeed_config`.
        hyperparameters: Values for ``"auto"`` keys, also in their block ``training_arguments``; by
            default those of the trial that this process runs.

    Returns:
        The configuration, complete and consistent for any number of ranks;
        :meth:`EngineConfig.batch_sizes` needs that number.

    Raises:
        ConfigError: With every problem of the file.

    Example:
        >>> content = {"train_batch_size": 8, "bf16": {"enabled": True}}
        >>> config = zerolab.config.load_engine_config(content)
        >>> config.dtype, config.zero_optimization.stage
        ('bf16', 0)
    """
    name = "engine config" if isinstance(source, Mapping) else str(source)
    if not isinstance(hyperparameters, Mapping | None):
        type_name = type(hyperparameters).__name__
        raise ConfigError(name, [f"hyperparameters: must be a mapping, got a {type_name}"])
    content, changes = read_source(source)
    parsed = parse_engine_config(content, name, overrides, to_json_values(hyperparameters))
    log_changes(name, [*changes, *parsed.changes])
    if parsed.problems or parsed.config is None:
        raise ConfigError(name, parsed.problems)
    return parsed.config


def parse_engine_config(
    content: Mapping[str, Any],
    source: str,
    overrides: Mapping[str, Any] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    batches: int | None = None,
    *,
    strict: bool = False,
) -> EngineFile:
    """Check an engine configuration and collect all its errors.

    Args:
        content: The file.
        source: Its name, for messages.
        overrides: Merged into the file.
        hyperparameters: Values for ``"auto"`` keys; None means those of the trial that this process
            runs.
        batches: Maximum length of the trial in optimizer steps.
        strict: Skip normalization.
    """
    changes: list[str] = []
    parts: list[Mapping[str, Any]] = []
    reader = Dialect() if strict else dialect()
    for name, part in ((source, content), ("overrides", to_json_values(overrides or {}))):
        try:
            clean, more = reader.normalize(part, name)
        except ConfigError as error:
            return EngineFile(None, error.problems, frozenset(), changes)
        parts.append(clean)
        changes += more
    renamed, twice = dialect().without_aliases(merge(*parts))
    filled = dialect().fill_auto(renamed, hyperparameters, batches, hints_of(EngineConfig))
    reduced, dropped = reader.drop_idle(filled.content)
    filled, changes = replace(filled, content=dict(reduced)), changes + dropped
    return _check(filled, source, parts[1], changes, twice)


def _check(
    filled: ResolvedAuto,
    source: str,
    overrides: Mapping[str, Any],
    changes: list[str],
    twice: list[str],
) -> EngineFile:
    supported, refused, off = dialect().remove_unsupported(filled.content, _OPAQUE)
    config, invalid, paths = validate(EngineConfig, drop_nulls(supported, ()))
    problems = [*filled.problems, *twice, *refused, *invalid]
    bad = frozenset(dotted(path) for path in paths) | filled.bad
    if config is None:
        return EngineFile(None, problems, bad, changes, left_open=filled.problems)
    config = _canonical(config)
    wrong_keys = {problem.partition(": ")[0] for problem in problems}
    for keys, problem in _checks(config):
        is_repeated = problem.partition(": ")[0] in wrong_keys
        if not is_repeated and not any(_touches(key, bad) for key in keys):
            problems.append(problem)
    overridden = frozenset(dotted(path) for path in _leaves(overrides))
    config = config.with_origin(source, overridden, tuple(off), filled.origins)
    return EngineFile(config, problems, bad, changes, left_open=filled.problems)


def _touches(key: str, bad: frozenset[str]) -> bool:
    return any(key == wrong or wrong.startswith(f"{key}.") for wrong in bad)


def _leaves(data: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _canonical(config: EngineConfig) -> EngineConfig:
    """Return the configuration with canonical names of optimizer and schedule."""
    update: dict[str, Section] = {}
    if config.optimizer is not None:
        name = optimizers.canonical_optimizer(config.optimizer.type)
        update["optimizer"] = config.optimizer.model_copy(update={"type": name})
    if config.scheduler is not None:
        name = schedules.canonical_schedule(config.scheduler.type)
        update["scheduler"] = config.scheduler.model_copy(update={"type": name})
    return config.model_copy(update=update) if update else config


def _checks(config: EngineConfig) -> Iterator[tuple[list[str], str]]:
    """Yield violated rules between keys: the keys that each one reads, and the problem."""
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
    yield from _offload_checks(config)
    yield from _parallel_checks(config)
    yield from _extension_checks(config)
    if config.optimizer is not None:
        for problem in optimizers.problems_of(config.optimizer):
            yield ["optimizer"], problem
    if config.scheduler is not None:
        for problem in schedules.problems_of(config.scheduler):
            yield ["scheduler"], problem


def _offload_checks(config: EngineConfig) -> Iterator[tuple[list[str], str]]:
    """Yield violated rules between keys for offloading."""
    zero, stage = config.zero_optimization, "zero_optimization.stage"
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
    if param.device == "nvme" and not param.nvme_path:
        yield (
            ["zero_optimization.offload_param"],
            "zero_optimization.offload_param.nvme_path: is required for device 'nvme', "
            "got nothing; name a directory on a fast disk",
        )
    if param.device == "nvme" and config.checkpoint.writer.decoupled:
        yield (
            ["zero_optimization.offload_param", "checkpoint.writer"],
            "checkpoint.writer.decoupled: must be false with offload_param.device 'nvme', as it "
            "copies all that is saved to memory, got true",
        )
    if optimizer.ratio != 1.0:
        yield (
            ["zero_optimization.offload_optimizer"],
            "zero_optimization.offload_optimizer.ratio: must be 1 (all states are offloaded, "
            f"or none), got {optimizer.ratio}",
        )


def _parallel_checks(config: EngineConfig) -> Iterator[tuple[list[str], str]]:
    """Yield violated rules between keys for a model that is divided over ranks."""
    zero = config.zero_optimization
    if zero.shard_ranks is not None and zero.stage == 0:
        yield (
            ["zero_optimization.stage", "zero_optimization.mics_shard_size"],
            "zero_optimization.mics_shard_size: must be -1 at stage 0, which shards nothing, "
            f"got {zero.shard_ranks}; set zero_optimization.stage to 1, 2 or 3",
        )
    if config.tensor_parallel.size > 1 and config.compile.enabled:
        yield (
            ["tensor_parallel", "compile.enabled"],
            "tensor_parallel.size: must be 1 where compile.enabled is true, as the exchanges "
            f"inside of cut layers do not compile, got {config.tensor_parallel.size}",
        )
    stages = config.pipeline.stages or 1
    if stages > 1 and (rules := PARTS.find("pipeline_rules")):
        yield from rules.pipeline_checks(config, stages)


def _extension_checks(config: EngineConfig) -> Iterator[tuple[list[str], str]]:
    """Yield the keys whose extension has been removed."""
    extensions: Registry[object] = Registry("zerotrial.engine_parts", {})
    for key, name in config.engine_parts.items():
        if name not in extensions:  # not loaded here: it needs torch
            yield [key], f"{key}: {extensions.problem(name)}"


def overwrite_deepspeed_config(
    base: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge overrides into an engine configuration, key by key at every depth.

    A mapping merges into a mapping; anything else (a scalar, a list, null, ``"auto"``) is
    replaced, whichever side is the mapping. Neither argument is changed or shared.

    Args:
        base: Path of a JSON file, or its content as a mapping.
        overrides: Changes, e.g. ``{"optimizer": {"params": {"lr": 0.005}}}``.

    Returns:
        A new mapping.

    Raises:
        ConfigError: If ``base`` is a path that cannot be read as JSON, or an argument is neither.

    Example:
        >>> base = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
        >>> zerotrial.overwrite_deepspeed_config(base, {"zero_optimization": {"stage": 2}})
        {'train_batch_size': 8, 'zero_optimization': {'stage': 2}}
    """
    problems: list[str] = []
    if not isinstance(base, str | PathLike | Mapping):
        type_name = type(base).__name__
        problems.append(f"base: must be the path of a JSON file or a mapping, got a {type_name}")
    if not isinstance(overrides, Mapping):
        problems.append(f"overrides: must be a mapping, got a {type(overrides).__name__}")
    if problems:
        raise ConfigError("overwrite_deepspeed_config", problems)
    content, changes = read_source(base)
    parts = []
    name = "engine config" if isinstance(base, Mapping) else str(base)
    for source, part in ((name, content), ("overrides", overrides)):
        clean, more = dialect().normalize(part, source)
        log_changes(source, [*changes, *more])
        parts.append(clean)
        changes = []
    return merge(*parts)
