"""`backend` in an experiment file: removed, with its replacement in the error."""

from typing import Any

import pytest

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment, load_experiment
from zerolab.errors import ConfigError

EXPERIMENT: dict[str, Any] = {
    "entrypoint": "model_def:T",
    "hyperparameters": {"deepspeed_config": {"train_batch_size": "four"}},
    "searcher": {"name": "single", "metric": "loss", "max_length": 10},
}


@pytest.mark.parametrize("backend", ["deepspeed", "megatron", {"name": "deepspeed"}])
def test_removed_backend_is_rejected(backend: Any) -> None:
    files = MemoryFiles({"model_def.py": b"class T(ZeroTrial): ..."})
    with pytest.raises(ConfigError) as caught:
        check_experiment({**EXPERIMENT, "backend": backend}, files)
    problem, other = caught.value.problems  # the engine file is checked in the same call
    assert problem.startswith("backend: is not supported; remove it to train with Zerolab's engine")
    assert "deepspeed.initialize() in the trial" in problem
    assert "train_batch_size: must be a whole number" in other


@pytest.mark.parametrize("backend", ["zerolab", None])
def test_backend_zerolab_is_accepted(backend: Any) -> None:
    experiment = {**EXPERIMENT, "hyperparameters": {}}
    assert load_experiment({**experiment, "backend": backend}) == load_experiment(experiment)
