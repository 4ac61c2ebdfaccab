"""Configuration: experiment files (YAML) and engine files (DeepSpeed's JSON), read strictly.

Importing this package is cheap; each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolab.config.checking import check_experiment, check_file
    from zerolab.config.engine.batch import BatchSizes
    from zerolab.config.engine.engine_config import EngineConfig, load_engine_config
    from zerolab.config.engine.merge import overwrite_deepspeed_config
    from zerolab.config.engine.resolved import resolve
    from zerolab.config.experiment.experiment_config import ExperimentConfig, load_experiment
    from zerolab.config.experiment.hyperparameters import grid_points, sample_hyperparameters

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
    "BatchSizes": "engine.batch",
    "EngineConfig": "engine.engine_config",
    "ExperimentConfig": "experiment.experiment_config",
    "check_experiment": "checking",
    "check_file": "checking",
    "grid_points": "experiment.hyperparameters",
    "load_engine_config": "engine.engine_config",
    "load_experiment": "experiment.experiment_config",
    "overwrite_deepspeed_config": "engine.merge",
    "resolve": "engine.resolved",
    "sample_hyperparameters": "experiment.hyperparameters",
}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"zerolab.config.{_HOMES[name]}"), name)
