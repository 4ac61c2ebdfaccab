"""``deepspeed`` itself."""

from typing import Any, NoReturn

from zerolab.errors import ConfigError
from zerotrial.compat.deepspeed.engine import DeepSpeedEngine
from zerotrial.compat.deepspeed.finder import VERSION
from zerotrial.compat.deepspeed.gathering import OnDevice
from zerotrial.compat.deepspeed.initialize import initialize
from zerotrial.compat.deepspeed.names.accelerator import get_accelerator
from zerotrial.compat.deepspeed.names.comm import init_distributed
from zerotrial.compat.deepspeed.names.utils import log_dist
from zerotrial.compat.scripts import add_config_arguments

__all__ = [
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


def tp_model_init(*unused: Any, **options: Any) -> NoReturn:
    """Refuse: models are cut by the engine file.

    Raises:
        ConfigError: Always.
    """
    del unused, options
    msg = "models are not cut before initialize(); set tensor_parallel.size in the engine file"
    raise ConfigError("tp_model_init()", [msg])
