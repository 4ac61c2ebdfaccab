"""Elastic trials: numbers of ranks that keep the batch, and rejected files."""

from pathlib import Path
from typing import Any

import pytest

from zerolab.config import load_engine_config
from zerolab.config.engine.batch import BatchSizes, keep_batch, keep_planned_batch
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.config.experiment.resources import ResourcesConfig, fewer_slots
from zerolab.config.validation import check_experiment
from zerolab.errors import ConfigError

ENGINE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


def resources(folder: Path, **more: object) -> ResourcesConfig:
    (folder / "train.py").write_text("")
    file: dict[str, Any] = {
        "entrypoint": "python train.py",
        "hyperparameters": {"deepspeed_config": ENGINE},
        "searcher": {"name": "single", "metric": "loss"},
        "resources": {"slots_per_trial": 4, **more},
    }
    return check_experiment(file, FolderFiles(folder)).resources


def test_fewer_ranks_take_more_micro_batches() -> None:
    planned = BatchSizes(train=24, micro=2, accumulation_steps=3, dp_world_size=4)
    assert keep_batch(planned, 2) == BatchSizes(24, 2, 6, 2)
    assert keep_batch(planned, 3) == BatchSizes(24, 2, 4, 3)
    problem = keep_batch(BatchSizes(16, 2, 2, 4), 3)
    assert isinstance(problem, str)
    assert "16 samples in micro-batches of 2 cannot be shared by 3" in problem
    assert problem.endswith("1, 2, 4 of them can")


def test_smaller_run_keeps_batch() -> None:
    config = load_engine_config(ENGINE)
    with keep_planned_batch(4, 2):
        assert config.batch_sizes(2) == BatchSizes(24, 2, 6, 2)
    assert config.batch_sizes(2) == BatchSizes(12, 2, 3, 2)


def test_elastic_counts_from_engine_file(tmp_path: Path) -> None:
    filled = resources(tmp_path, elastic={"min_slots": 2})
    assert filled.elastic is not None
    assert filled.elastic.counts == [1, 2, 3, 4]
    assert fewer_slots(filled) == [3, 2]
    assert fewer_slots(resources(tmp_path, elastic={"min_slots": 2, "counts": [2]})) == [2]
    assert fewer_slots(resources(tmp_path)) == []


def test_elastic_count_divides_batch(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="one of 1, 2, 3, 6, got 4"):
        resources(tmp_path, slots_per_trial=6, elastic={"min_slots": 4})
    with pytest.raises(ConfigError, match=r"elastic\.min_slots: must be at most"):
        resources(tmp_path, elastic={"min_slots": 5})
    with pytest.raises(ConfigError, match="slots_per_rank: must divide slots_per_trial = 4, got 3"):
        resources(tmp_path, slots_per_rank=3)
