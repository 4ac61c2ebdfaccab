"""The engine's resolved configuration, with the origin of every value."""

from collections.abc import Iterable, Iterator
from typing import Any

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.optimizers import OPTIMIZERS
from zerolab.config.engine.schedules import SCHEDULES, canonical_schedule
from zerolab.config.engine.zero import LIVE_LIMIT
from zerolab.schema.section import Section, hints_of

__all__ = ["Entry", "format_entries", "ineffective_keys", "resolve"]

Entry = tuple[str, Any, str]
"""Dotted key, value, origin. The origin begins with ``file``, ``override``, ``auto``, ``default``,
``derived`` or ``hint``; after a colon there may be a remark."""

_BUCKET = "zero_optimization.reduce_bucket_size"
_OFF = "hint: does not exist here, and is off"


def resolve(
    config: EngineConfig, world_size: int, model_elements: int | None = None
) -> list[Entry]:
    """Return the values that the engine will use, and their origins.

    Args:
        config: The configuration.
        world_size: Data-parallel ranks.
        model_elements: Trainable parameters, in elements, if known; buckets are clamped to them.

    Returns:
        A tuple ``(dotted key, value, origin)`` for each key that has an effect, and for each hint
        about the file.

    Raises:
        ConfigError: If the batch sizes do not fit the number of ranks.

    Example:
        >>> config = zerolab.config.load_engine_config({"train_batch_size": 8})
        >>> zerolab.config.resolve(config, world_size=2)[:2]
        [('train_batch_size', 8, 'file'), ('train_micro_batch_size_per_gpu', 4, 'derived')]
    """
    hints = _hints(config)
    derived = _derived(config, world_size, model_elements)
    entries: list[Entry] = []
    for key, value, is_set in _leaves(config, ""):
        origin = "file" if is_set else "default"
        if is_set and any(key == o or o.startswith(f"{key}.") for o in config.overridden):
            origin = "override"
        if key in config.auto:
            origin = f"auto: {config.auto[key]}"
        if key in hints:
            if is_set:
                entries.append((key, value, f"hint: {hints[key]}"))
        elif key == _BUCKET and not is_set:
            entries.append((key, None, "derived: the engine chooses it by the model's size"))
        elif key in derived and derived[key] != value:
            open_ = ": the file says auto" if key in config.auto else ""
            remark = f": {origin} says {value}" if is_set else open_
            entries.append((key, derived[key], f"derived{remark}"))
        else:
            entries.append((key, value, origin))
    entries += _optimizer_defaults(config)
    entries += _parameter_defaults(config)
    entries += [(key, None, _OFF) for key in config.off]
    return entries


def _optimizer_defaults(config: EngineConfig) -> Iterator[Entry]:
    """Yield ``"auto"`` parameters that have the optimizer's default."""
    prefix = "optimizer.params."
    optimizer = config.optimizer
    section = OPTIMIZERS.get(optimizer.type) if optimizer else None
    for key in config.auto:
        name = key.removeprefix(prefix)
        if optimizer and key.startswith(prefix) and name not in optimizer.params:
            field = section.model_fields.get(name) if section else None
            yield key, field.default if field else None, "auto: the optimizer's default"


def _parameter_defaults(config: EngineConfig) -> Iterator[Entry]:
    """Yield parameters of the optimizer and of the schedule that the file leaves out."""
    optimizer, scheduler = config.optimizer, config.scheduler
    sections = []
    if optimizer is not None and optimizer.type in OPTIMIZERS:
        sections.append(("optimizer.params.", OPTIMIZERS[optimizer.type], optimizer.params))
    if scheduler is not None and (name := canonical_schedule(scheduler.type)) in SCHEDULES:
        sections.append(("scheduler.params.", SCHEDULES[name], scheduler.params))
    for prefix, section, params in sections:
        hints = hints_of(section)
        for name, field in section.model_fields.items():
            key = prefix + name
            if name in params or name in hints or key in config.auto or field.is_required():
                continue
            yield key, field.default, "default" + _replaced_rate(config, key, field.default)


def _replaced_rate(config: EngineConfig, key: str, rate: Any) -> str:
    """Return a remark if a schedule's default replaces the learning rate of the file."""
    written = config.optimizer.params.get("lr") if config.optimizer is not None else None
    if key != "scheduler.params.warmup_max_lr" or None in (rate, written) or rate == written:
        return ""
    return f': replaces optimizer.params.lr {written}; set warmup_max_lr to it, or to "auto"'


_STAGES = {
    "prescale_gradients": (0, 1, 2),
    "gradient_predivide_factor": (0, 1, 2),
    _BUCKET: (0, 1, 2),
    "zero_optimization.allgather_bucket_size": (1, 2),
    "zero_optimization.overlap_comm": (0, 1, 2),
    "zero_optimization.reduce_scatter": (1, 2),
    "zero_optimization.sub_group_size": (3,),
    "zero_optimization.stage3_prefetch_bucket_size": (3,),
    "zero_optimization.stage3_param_persistence_threshold": (3,),
    "zero_optimization.stage3_model_persistence_threshold": (3,),
    "zero_optimization.stage3_max_live_parameters": (3,),
    "zero_optimization.stage3_max_reuse_distance": (3,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (3,),
    "zero_optimization.leaf_module.classes": (3,),
}
"""Keys that have an effect at some stages only."""


def _hints(config: EngineConfig) -> dict[str, str]:
    """Return keys without effect in this configuration, with the reason."""
    hints = hints_of(EngineConfig)
    if config.optimizer is not None and config.optimizer.type in OPTIMIZERS:
        hints |= hints_of(OPTIMIZERS[config.optimizer.type], "optimizer.params.")
    for key, stages in _STAGES.items():
        if config.zero_optimization.stage not in stages:
            hints[key] = f"has an effect at stage {', '.join(map(str, stages))} only"
    return hints


def _derived(config: EngineConfig, world_size: int, model_elements: int | None) -> dict[str, Any]:
    """Return values that follow from others and that the file leaves out."""
    sizes = config.batch_sizes(world_size)
    zero = config.zero_optimization
    # With one micro-batch there is nothing to sum: gradients keep the type of backward.
    summed = "fp32" if config.sums_micro_batches(sizes.accumulation_steps) else config.dtype
    accumulate = config.data_types.grad_accum_dtype or summed
    values: dict[str, Any] = {
        "train_batch_size": sizes.train,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation_steps,
        "data_types.grad_accum_dtype": accumulate,
        "data_types.param_dtype": config.dtype,
        "communication_data_type": config.communication_data_type or accumulate,
        "activation_checkpointing.enabled": config.activation_checkpointing.active,
    }
    if zero.overlap_comm is None:
        values["zero_optimization.overlap_comm"] = True
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    set_limits = [name for name in limits if getattr(zero, name) is not None]
    values |= {
        f"zero_optimization.{name}": LIVE_LIMIT
        for name in set(limits) - set(set_limits)
        if set_limits
    }
    if model_elements is not None:
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            values[f"zero_optimization.{name}"] = min(getattr(zero, name), model_elements)
    return values


def ineffective_keys(config: EngineConfig, entries: Iterable[Entry]) -> list[str]:
    """List the keys that are set and have no effect.

    Args:
        config: The configuration.
        entries: From :func:`resolve`.

    Returns:
        Dotted keys whose values differ from their defaults.
    """
    defaults = {key: value for key, value, _ in _leaves(EngineConfig(), "")}
    if config.optimizer is not None and config.optimizer.type in OPTIMIZERS:
        fields = OPTIMIZERS[config.optimizer.type].model_fields
        defaults |= {f"optimizer.params.{name}": field.default for name, field in fields.items()}
    return [
        key
        for key, value, origin in entries
        if origin.startswith("hint") and origin != _OFF and value != defaults.get(key)
    ]


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield key, value and whether the file sets it, for everything inside a section."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield from ((f"{prefix}{name}.{key}", value[key], True) for key in value)
        else:
            yield f"{prefix}{name}", value, name in section.model_fields_set


def format_entries(entries: Iterable[Entry], origins: Iterable[str] = ()) -> str:
    """Write entries as aligned lines ``key = value   (origin)``.

    Args:
        entries: From :func:`resolve`.
        origins: First words of the origins to include; all if empty.
    """
    selected = set(origins)
    rows = [
        (f"{key} = {_text(value)}", origin)
        for key, value, origin in entries
        if not selected or origin.partition(":")[0] in selected
    ]
    width = min(max((len(text) for text, _ in rows), default=0), 64)
    return "\n".join(f"{text:<{width}}  ({origin})" for text, origin in rows)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:,}".replace(",", "_") if isinstance(value, int) else str(value)
