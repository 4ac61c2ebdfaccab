"""``deepspeed.initialize``."""

import inspect
import logging
import os
from typing import Any, cast

from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError
from zerotrial.engine.builder.arguments import invalid_arguments, read_config
from zerotrial.engine.builder.build import initialize as build
from zerotrial.engine.builder.environment import is_pipeline
from zerotrial.engine.engine import Engine
from zerotrial.extensions.deepspeed_api.engine import DeepSpeedEngine
from zerotrial.extensions.deepspeed_api.finder import VERSION
from zerotrial.extensions.deepspeed_api.parameter_access import know

__all__ = ["CUT_OVER", "initialize"]

logger = logging.getLogger(__name__)

CUT_OVER = "_zerolab_cut_over"
"""Attribute of a model in which ``tp_model_init`` stores the number of its shards."""

DEFAULT_CLIPPING = 1.0
"""DeepSpeed 0.19.8's default of ``gradient_clipping``; our engine does not clip by default."""
DEFAULT_PERSISTENCE = 100_000
"""DeepSpeed's default for the number of elements below which parameters stay full at stage 3."""


def _with_small_whole(config: EngineConfig) -> EngineConfig:
    """Keep small parameters replicated by default, so that scripts can read them."""
    zero = config.zero_optimization
    if zero.stage != 3 or zero.stage3_param_persistence_threshold is not None:
        return config
    defaults = {"stage3_param_persistence_threshold": DEFAULT_PERSISTENCE}
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=defaults)})


def _clipped(config: EngineConfig, *, trains: bool) -> EngineConfig:
    """Clip by default, as the DeepSpeed version of this replacement does."""
    if "gradient_clipping" in config.model_fields_set:
        return config
    if trains and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: gradient_clipping: is missing; %s is used, as DeepSpeed %s does; 0 is off",
            config.source,
            DEFAULT_CLIPPING,
            VERSION,
        )
    return config.model_copy(update={"gradient_clipping": DEFAULT_CLIPPING})


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Build an engine as ``deepspeed.initialize`` does; see ``zerotrial.initialize``.

    **Collective**.
    """
    names = [name for name in inspect.signature(build).parameters if name != "engine_class"]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    unknown = sorted(arguments.keys() - set(names))
    if unknown:
        raise TypeError(f"initialize() got an unexpected keyword argument {unknown[0]!r}")
    read = _read(**arguments)
    built = build(**arguments | read, engine_class=_class_for(arguments["model"]))
    know(cast("Any", built[0]))
    return built


def _class_for(model: nn.Module) -> type[Engine]:
    if not is_pipeline(model):
        return DeepSpeedEngine
    from zerotrial.extensions.deepspeed_api.pipeline import PipelineEngine

    return PipelineEngine


def _read(
    *,
    args: Any = None,
    model: Any = None,
    config: Any = None,
    config_params: Any = None,
    optimizer: Any = None,
    training_data: Any = None,
    mpu: Any = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Read the configuration as the engine would, with DeepSpeed's defaults for two keys."""
    del arguments
    problems = invalid_arguments(optimizer, training_data)
    content = config if config is not None else config_params
    read = read_config(args, model, content, problems)
    trains = optimizer is not None or read.optimizer is not None
    read = _cut(model, _with_small_whole(_clipped(read, trains=trains)), mpu)
    return {"args": None, "config": read, "config_params": None}


def _cut(model: nn.Module, config: EngineConfig, mpu: Any) -> EngineConfig:
    """Shard the model over the ranks requested by ``tp_model_init``, if any."""
    parallel = config.tensor_parallel
    size = vars(model).get(CUT_OVER, parallel.size)
    if parallel.size not in (1, size):
        sizes = f"got {parallel.size} and {size}"
        problem = f"tensor_parallel.size: must equal the size of tp_model_init(), {sizes}"
        raise ConfigError(config.source, [problem])
    parallel = parallel.model_copy(update={"size": size})
    config = config.model_copy(update={"tensor_parallel": parallel})
    return _counted_by_replica(config) if size > 1 and mpu is None else config


def _counted_by_replica(config: EngineConfig) -> EngineConfig:
    """Drop a batch size that counts every rank, as DeepSpeed does when it shards the model."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps or 1
    if micro is None or config.train_batch_size != micro * steps * ranks:
        return config
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: train_batch_size: %d counts each model-parallel rank, as DeepSpeed does; ignored",
            config.source,
            config.train_batch_size,
        )
    return config.model_copy(update={"train_batch_size": None})
