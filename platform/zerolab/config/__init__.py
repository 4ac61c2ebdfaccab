"""Configuration: experiment files (YAML) and engine files (DeepSpeed's JSON), read strictly.

Importing this package is cheap; each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolab.config.engine.batch import BatchSizes
    from zerolab.config.engine.engine_config import EngineConfig
    from zerolab.config.engine.reader import load_engine_config, overwrite_deepspeed_config
    from zerolab.config.engine.resolved_config import resolve
    from zerolab.config.experiment.experiment_config import ExperimentConfig, load_experiment
    from zerolab.config.validation import check_experiment, check_file
    from zerolab.schema.hyperparameters import grid_points, sample_hyperparameters

__all__ = [
    "BatchSizes",
    "EngineConfig",
    "ExperimentConfig",
    "check_experiment",
    "check_file",
    "grid_points",
    "load_engine_config",
    "load_experiment",
    "overwrite_deepspeed_config",
    "resolve",
    "sample_hyperparameters",
]

_HOMES = {
    "BatchSizes": "zerolab.config.engine.batch",
    "EngineConfig": "zerolab.config.engine.engine_config",
    "ExperimentConfig": "zerolab.config.experiment.experiment_config",
    "check_experiment": "zerolab.config.validation",
    "check_file": "zerolab.config.validation",
    "grid_points": "zerolab.schema.hyperparameters",
    "load_engine_config": "zerolab.config.engine.reader",
    "load_experiment": "zerolab.config.experiment.experiment_config",
    "overwrite_deepspeed_config": "zerolab.config.engine.reader",
    "resolve": "zerolab.config.engine.resolved_config",
    "sample_hyperparameters": "zerolab.schema.hyperparameters",
}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
