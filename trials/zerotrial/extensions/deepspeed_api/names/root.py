"""``deepspeed`` itself."""

from typing import Any, NoReturn

from torch import nn

from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.engine import DeepSpeedEngine
from zerotrial.extensions.deepspeed_api.finder import VERSION
from zerotrial.extensions.deepspeed_api.initialize import CUT_OVER, initialize
from zerotrial.extensions.deepspeed_api.names.accelerator import get_accelerator
from zerotrial.extensions.deepspeed_api.names.comm import init_distributed
from zerotrial.extensions.deepspeed_api.names.utils import log_dist
from zerotrial.extensions.deepspeed_api.parameter_access import OnDevice
from zerotrial.extensions.scripts import add_config_arguments

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "OnDevice",
    "__version__",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "tp_model_init",
    "version",
]

__version__ = version = VERSION

DeepSpeedConfigError = ConfigError


def init_inference(*unused: Any, **options: Any) -> NoReturn:
    """Refuse: there is no inference engine.

    Raises:
        ConfigError: Always.
    """
    del unused, options
    msg = (
        "there is no inference engine; call the model under torch.no_grad(), or give initialize() "
    )
    raise ConfigError("init_inference()", [f"{msg}a file without an optimizer to have it sharded"])


def tp_model_init(model: nn.Module, tp_size: int, *unused: Any, **options: Any) -> nn.Module:
    """Mark a model for tensor parallelism, which ``initialize()`` applies, and return it.

    Args:
        model: A model to pass to ``initialize()``.
        tp_size: Number of ranks that share one model.
        unused: ``dtype`` and ``config``; those of ``initialize()`` apply.
        options: ``tp_group`` is refused: pass ``mpu`` to ``initialize()``.

    Raises:
        ConfigError: If a group is given or the size is invalid.
    """
    del unused
    if type(tp_size) is not int or tp_size < 1:
        msg = f"tp_size: must be a whole number of ranks, at least 1, got {tp_size!r}"
        raise ConfigError("tp_model_init()", [msg])
    if options.get("tp_group") is not None:
        msg = "tp_group: is not supported; the ranks of a model are neighbours; for others pass "
        raise ConfigError("tp_model_init()", [f"{msg}mpu= to initialize()"])
    vars(model)[CUT_OVER] = tp_size
    return model
