"""Determined's client as functions."""

from zerolab.client.objects import Checkpoint, Experiment, Model, ModelVersion, Trial
from zerotrial.extensions.determined_api.client_api import (
    Determined,
    create_experiment,
    create_model,
    get_checkpoint,
    get_experiment,
    get_model,
    get_models,
    get_trial,
    list_experiments,
    login,
)
from zerotrial.extensions.determined_api.missing import missing_name

__all__ = [
    "Checkpoint",
    "Determined",
    "Experiment",
    "Model",
    "ModelVersion",
    "Trial",
    "create_experiment",
    "create_model",
    "get_checkpoint",
    "get_experiment",
    "get_model",
    "get_models",
    "get_trial",
    "list_experiments",
    "login",
]

__getattr__ = missing_name("determined.experimental.client")
