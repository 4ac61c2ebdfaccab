"""``backend: deepspeed``: the engine of a real DeepSpeed, under the same trial class."""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from torch import nn

from zerolab.config.engine.normalization import read_source
from zerolab.config.experiment.backends import NOT_INSTALLED
from zerolab.contract.spec import ENV_AS_DEEPSPEED, Backend
from zerolab.errors import ConfigError
from zerotrial.compat.scripts import init_distributed
from zerotrial.engine.build import built_by
from zerotrial.engine.building.ground import is_pipeline

__all__ = ["engines_of", "initialize"]

logger = logging.getLogger(__name__)

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"} | {
    "MASTER_PORT": "0"
}
"""What DeepSpeed wants to read of a process that is alone; else it looks for MPI."""

_ONE_BIT = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})
_QUANTIZED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


@contextlib.contextmanager
def engines_of(backend: Backend) -> Iterator[None]:
    """Have ``zerotrial.initialize`` make the engines of a backend, in this context.

    Args:
        backend: As the experiment says.
    """
    with built_by(initialize if backend == "deepspeed" else None):
        yield


def initialize(
    *,
    model: Any,
    config: Any,
    args: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    device: Any = None,
    **more: Any,
) -> tuple[Any, Any, Any, Any]:
    """Build a real DeepSpeed engine from the arguments of ``zerotrial.initialize``. **Collective**.

    The configuration is read as a file or a mapping and given to DeepSpeed as it is. As with our
    engine, all parameters that require gradients are trained where none are named.

    Args:
        model: The model; a pipeline must be of ``deepspeed.pipe``.
        config: File name or mapping.
        args: An object whose ``deepspeed_config`` names the file, when ``config`` is not given.
        optimizer: As DeepSpeed takes it.
        model_parameters: As DeepSpeed takes them.
        device: None: DeepSpeed chooses.
        more: Further arguments of ``deepspeed.initialize``.

    Raises:
        ConfigError: If there is no real DeepSpeed, or with what it cannot take.
    """
    deepspeed = _import()
    named = getattr(args, "deepspeed_config", None)
    given: Any = config if config is not None else named
    problems = list(_problems(model, given, device))
    if named is not None and config is not None:
        problems.append("config: is given twice, by args.deepspeed_config and by config; keep one")
    content: Mapping[str, Any] = {}
    if isinstance(given, str | PathLike | Mapping):
        content, _ = read_source(given)
        problems += _lacking(deepspeed, content)
    if problems:
        raise ConfigError("initialize() with backend: deepspeed", problems)
    if model_parameters is None and optimizer is None and "optimizer" in content:
        model_parameters = [p for p in model.parameters() if p.requires_grad]
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(_ALONE)
    init_distributed()
    made: tuple[Any, Any, Any, Any] = deepspeed.initialize(
        model=model,
        config=dict(content),
        optimizer=optimizer,
        model_parameters=model_parameters,
        **more,
    )
    _say_clipping(made[0], content)
    return made


def _lacking(deepspeed: Any, content: Mapping[str, Any]) -> Iterator[str]:
    """Name what this DeepSpeed has not, or not on this machine, where it would not say so."""
    device = deepspeed.accelerator.get_accelerator().device_name()
    optimizer = content.get("optimizer")
    kind = str(optimizer.get("type")) if isinstance(optimizer, Mapping) else ""
    if kind.lower() in _ONE_BIT:
        if importlib.util.find_spec("deepspeed.runtime.fp16.onebit") is None:
            yield (
                f"optimizer.type: {kind} is not in DeepSpeed {deepspeed.__version__}, which has no "
                "1-bit optimizers since 0.19.7; pip install 'deepspeed<=0.19.6', or use AdamW"
            )
        elif device == "cpu":
            yield f"optimizer.type: {kind} needs GPUs, and DeepSpeed runs on CPUs here; use AdamW"
    zero = content.get("zero_optimization")
    for key in _QUANTIZED if device == "cpu" else ():
        if isinstance(zero, Mapping) and zero.get(key) is True:
            yield (
                f"zero_optimization.{key}: must be false where DeepSpeed runs on CPUs, for which "
                "it has no such kernel, got true"
            )


def _say_clipping(engine: Any, content: Mapping[str, Any]) -> None:
    """Say what DeepSpeed takes where the file is silent and the two engines differ."""
    limit = float(engine.gradient_clipping() or 0)
    if "gradient_clipping" not in content and limit > 0 and os.environ.get("RANK") == "0":
        logger.warning(
            "gradient_clipping: is not in the file; DeepSpeed then clips at %s, and Zerolab's own "
            "engine does not; set it to have the same training on both",
            limit,
        )


def _import() -> Any:
    if os.environ.get(ENV_AS_DEEPSPEED):
        problem = f"backend: deepspeed needs a real one, got {ENV_AS_DEEPSPEED}; unset it"
        raise ConfigError("initialize()", [problem])
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise  # something that it needs itself
        raise ConfigError("initialize()", [NOT_INSTALLED]) from None
    return deepspeed


def _problems(model: Any, config: Any, device: Any) -> Iterator[str]:
    if not isinstance(model, nn.Module):
        yield f"model: must be a torch.nn.Module, got {type(model).__name__}"
    elif is_pipeline(model):
        yield "model: must be a deepspeed.pipe.PipelineModule, got a zerotrial.PipelineModule"
    if not isinstance(config, str | PathLike | Mapping):
        found = "nothing" if config is None else type(config).__name__
        yield f"config: must be a file name or a mapping, got {found}"
    if device is not None:
        yield f"device: is chosen by DeepSpeed, got {device}; leave it out"
