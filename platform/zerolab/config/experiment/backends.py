"""What is checked of an experiment whose engine is a real DeepSpeed's."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zerolab.config.engine.merge import merge
from zerolab.config.engine.reader import EngineFile
from zerolab.config.experiment.sections import EnvironmentConfig
from zerolab.contract.spec import ENV_AS_DEEPSPEED

__all__ = ["NOT_INSTALLED", "missing_deepspeed", "other_engine_file"]

NOT_INSTALLED = (
    "backend: deepspeed needs the package deepspeed, which is not installed here; "
    "pip install 'zerolab[deepspeed]', or leave backend out to train with Zerolab's own engine"
)


def missing_deepspeed(environment: EnvironmentConfig) -> Iterator[str]:
    """Say that a real DeepSpeed is needed, where this Python has none.

    Args:
        environment: Of the experiment; of another interpreter nothing is known here.
    """
    if environment.python is not None or os.environ.get(ENV_AS_DEEPSPEED):
        return  # under the stand-in's name only a trial's own process finds the real one
    if importlib.util.find_spec("deepspeed") is None:
        yield NOT_INSTALLED


def other_engine_file(
    content: Mapping[str, Any], source: str, *, overrides: Mapping[str, Any]
) -> EngineFile:
    """Look at an engine file as far as DeepSpeed would not say what is wrong.

    Args:
        content: The file.
        source: Its name.
        overrides: Laid over it.
    """
    del source
    problems = [
        f"{key}: must be a value with backend: deepspeed, which fills in no 'auto', got 'auto'"
        for key in _autos(merge(content, overrides))
    ]
    return EngineFile(None, problems, frozenset())


def _autos(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Name the keys that say ``"auto"``; in ``zero_optimization`` DeepSpeed takes its default."""
    for key, value in block.items():
        if isinstance(value, Mapping):
            if prefix or key != "zero_optimization":
                yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"
