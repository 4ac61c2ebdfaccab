"""Determined's PyTorch trials."""

from zerotrial import (
    Batch,
    DataLoader,
    Epoch,
    MetricReducer,
    Reducer,
    TorchData,
    Trainer,
    data_length,
    samplers,
    to_device,
)
from zerotrial import Callback as PyTorchCallback
from zerotrial.extensions.determined_api.lr_scheduler import LRScheduler
from zerotrial.extensions.determined_api.missing import missing_name
from zerotrial.extensions.determined_api.pytorch_trial import (
    PyTorchTrial,
    PyTorchTrialContext,
    init,
)

__all__ = [
    "Batch",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "TorchData",
    "Trainer",
    "data_length",
    "init",
    "samplers",
    "to_device",
]

__getattr__ = missing_name("determined.pytorch")
