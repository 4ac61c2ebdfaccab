"""``deepspeed.initialize``."""

import inspect
import logging
import os
from typing import Any

from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerotrial.compat.deepspeed.engine import DeepSpeedEngine
from zerotrial.compat.deepspeed.finder import VERSION
from zerotrial.compat.deepspeed.gathering import LEAF, know
from zerotrial.engine.build import initialize as build
from zerotrial.engine.building.arguments import read_config, unusable
from zerotrial.engine.building.ground import is_pipeline
from zerotrial.engine.engine import Engine

__all__ = ["initialize"]

logger = logging.getLogger(__name__)

DEFAULT_CLIPPING = 1.0
"""What DeepSpeed 0.19.8 clips at where the file does not say; our engine does not."""


def _clipped(config: EngineConfig, *, trains: bool) -> EngineConfig:
    """Clip where the file does not say, as the version of DeepSpeed that is stood in for does."""
    if "gradient_clipping" in config.model_fields_set:
        return config
    if trains and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: gradient_clipping: is not there; taken for %s, as DeepSpeed %s does; 0 is off",
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
    given = dict(zip(names, args, strict=False)) | kwargs
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise TypeError(f"initialize() got an unexpected keyword argument {unknown[0]!r}")
    read = _read(**given)
    made = build(**given | read, engine_class=_class_for(given["model"]))
    know(made[0])
    return made


def _class_for(model: nn.Module) -> type[Engine]:
    if not is_pipeline(model):
        return DeepSpeedEngine
    from zerotrial.compat.deepspeed.pipeline import PipelineEngine

    return PipelineEngine


def _read(
    *,
    args: Any = None,
    model: Any = None,
    config: Any = None,
    config_params: Any = None,
    optimizer: Any = None,
    training_data: Any = None,
    **others: Any,
) -> dict[str, Any]:
    """Read the configuration as the engine would, with DeepSpeed's default and what is marked."""
    del others
    problems = unusable(optimizer, training_data)
    given = config if config is not None else config_params
    read = read_config(args, model, given, problems)
    trains = optimizer is not None or read.optimizer is not None
    read = _with_leaves(model, _clipped(read, trains=trains))
    return {"args": None, "config": read, "config_params": None}


def _with_leaves(model: nn.Module, config: EngineConfig) -> EngineConfig:
    """Put what ``set_z3_leaf_modules`` has marked where the engine reads it."""
    marked = sorted({type(part).__name__ for part in model.modules() if LEAF in vars(part)})
    if not marked:
        return config
    zero = config.zero_optimization
    classes = [*zero.leaf_module.classes, *marked]
    leaf = zero.leaf_module.model_copy(update={"classes": classes})
    zero = zero.model_copy(update={"leaf_module": leaf})
    return config.model_copy(update={"zero_optimization": zero})
