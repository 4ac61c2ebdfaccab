"""Code of a trial's processes: trial API, training loop, and the ZeRO engine.

Public names are imported at first use, so that ``import zerotrial`` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.config.engine.reader import overwrite_deepspeed_config
    from zerotrial.callbacks import Callback
    from zerotrial.context import ZeroTrialContext
    from zerotrial.data.devices import TorchData, to_device
    from zerotrial.data.loader import DataLoader, data_length
    from zerotrial.engine.builder.build import initialize
    from zerotrial.engine_view import ModelParallelUnit
    from zerotrial.extensions import samplers
    from zerotrial.extensions.full_weights.export import read_weights
    from zerotrial.extensions.metric_reducers import MetricReducer
    from zerotrial.extensions.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
    from zerotrial.extensions.scripts import add_config_arguments, init_distributed
    from zerotrial.loop.fit_result import FitResult
    from zerotrial.loop.stop_reason import Ending, StopReason
    from zerotrial.loop.units import Batch, Epoch
    from zerotrial.ranks import Distributed
    from zerotrial.reducers import Reducer
    from zerotrial.trainer import Trainer, init
    from zerotrial.trial import InvalidHP, ZeroTrial

_EXPORTS = {
    "Batch": "zerotrial.loop.units",
    "Callback": "zerotrial.callbacks",
    "DataLoader": "zerotrial.data.loader",
    "Distributed": "zerotrial.ranks",
    "Ending": "zerotrial.loop.stop_reason",
    "Epoch": "zerotrial.loop.units",
    "FitResult": "zerotrial.loop.fit_result",
    "InvalidHP": "zerotrial.trial",
    "MetricReducer": "zerotrial.extensions.metric_reducers",
    "LayerSpec": "zerotrial.extensions.pipeline.layers",
    "ModelParallelUnit": "zerotrial.engine_view",
    "PipelineModule": "zerotrial.extensions.pipeline.module",
    "Reducer": "zerotrial.reducers",
    "StopReason": "zerotrial.loop.stop_reason",
    "TiedLayerSpec": "zerotrial.extensions.pipeline.layers",
    "TorchData": "zerotrial.data.devices",
    "Trainer": "zerotrial.trainer",
    "ZeroTrial": "zerotrial.trial",
    "ZeroTrialContext": "zerotrial.context",
    "add_config_arguments": "zerotrial.extensions.scripts",
    "data_length": "zerotrial.data.loader",
    "init": "zerotrial.trainer",
    "init_distributed": "zerotrial.extensions.scripts",
    "initialize": "zerotrial.engine.builder.build",
    "overwrite_deepspeed_config": "zerolab.config.engine.reader",
    "read_weights": "zerotrial.extensions.full_weights.export",
    "samplers": "zerotrial.extensions.samplers",
    "to_device": "zerotrial.data.devices",
}
"""Module that defines each public name."""

__all__ = [
    "Batch",
    "Callback",
    "DataLoader",
    "Distributed",
    "Ending",
    "Epoch",
    "FitResult",
    "InvalidHP",
    "LayerSpec",
    "MetricReducer",
    "ModelParallelUnit",
    "PipelineModule",
    "Reducer",
    "StopReason",
    "TiedLayerSpec",
    "TorchData",
    "Trainer",
    "ZeroTrial",
    "ZeroTrialContext",
    "add_config_arguments",
    "data_length",
    "init",
    "init_distributed",
    "initialize",
    "overwrite_deepspeed_config",
    "read_weights",
    "samplers",
    "to_device",
]


_DEEPSPEED_NAMES = frozenset(
    {"accelerator", "checkpointing", "comm", "get_accelerator", "ops", "pipe", "utils", "zero"}
)
"""Names of the module ``deepspeed`` other than ``initialize``."""


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise _missing_name_error(name)
    module = importlib.import_module(_EXPORTS[name])
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def _missing_name_error(name: str) -> Exception:
    """Make the error for a missing name, with a hint for names of Determined and DeepSpeed."""
    from zerolab.replacements import import_error

    if name in _DEEPSPEED_NAMES:
        alternative = "use it from `import deepspeed`, with `environment: {deepspeed: zerolab}`"
        return ImportError(f"zerotrial has no {name!r}; {alternative}", name="zerotrial")
    parents = ("determined.pytorch.deepspeed", "determined.pytorch", "determined")
    return import_error("zerotrial", name, *parents) or AttributeError(
        f"module 'zerotrial' has no attribute {name!r}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
