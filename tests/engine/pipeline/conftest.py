"""Skips the tests of this folder on a torch that is too old for pipelines."""

from pathlib import Path

import pytest
import torch

from zerolab.config import load_engine_config
from zerolab.config.torch_versions import torch_problems

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    config = load_engine_config({"train_batch_size": 2, "pipeline": {"stages": 2}})
    problems = torch_problems(config, torch.__version__)
    for item in items:
        if problems and FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=problems[0]))
