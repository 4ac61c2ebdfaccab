"""Conversion of Python values to those of a configuration file."""

import enum
import types
from collections import UserDict, UserList
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerolab.config import load_engine_config
from zerolab.config.experiment.experiment_config import load_experiment
from zerolab.errors import ConfigError
from zerolab.schema.json_values import to_json_values


class Device(enum.StrEnum):
    CPU = "cpu"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((0.9, 0.95), [0.9, 0.95]),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (np.array(3.0), 3.0),
        (np.str_("a"), "a"),
        (torch.tensor(2), 2),
        (torch.tensor([1.0]), [1.0]),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (Path("/tmp/x"), "/tmp/x"),
        (Device.CPU, "cpu"),
        (UserDict({"a": UserList([UserDict({"b": (1,)})])}), {"a": [{"b": [1]}]}),
        (types.MappingProxyType({"a": range(2)}), {"a": [0, 1]}),
        ("text", "text"),
        (None, None),
    ],
)
def test_python_values_become_plain(value: Any, plain: Any) -> None:
    result = to_json_values({"key": value})
    assert result == {"key": plain}
    assert type(result["key"]) is type(plain)


def test_cycles_end() -> None:
    cycle: dict[str, Any] = {}
    cycle |= {"a": cycle, "b": [cycle]}
    with pytest.raises(ConfigError, match="nested at most"):
        load_engine_config(cycle)


def test_iterators_are_rejected() -> None:
    optimizer = {"type": "AdamW", "params": {"betas": map(float, (0.9, 0.95))}}
    with pytest.raises(ConfigError, match=r"params\.betas: must be a list, got a map"):
        load_engine_config({"train_batch_size": 8, "optimizer": optimizer})


@pytest.mark.needs_extension("deepspeed_config")
def test_engine_config_reads_python_values() -> None:
    config = load_engine_config(
        UserDict(
            {
                "train_batch_size": np.int64(8),
                "bf16": {"enabled": np.bool_(True)},
                "optimizer": {"type": "AdamW", "params": {"betas": np.array([0.9, 0.95])}},
                "zero_optimization": {
                    "stage": np.int32(3),
                    "offload_optimizer": {"device": "nvme", "nvme_path": Path("/tmp/swap")},
                },
            }
        ),
        overrides={"gradient_clipping": np.float64(0.5)},
        hyperparameters={"lr": np.float32(0.25)},
    )
    assert config.train_batch_size == 8
    assert config.bf16.enabled is True
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == [0.9, 0.95]
    assert str(config.zero_optimization.offload_optimizer.nvme_path) == "/tmp/swap"
    assert config.gradient_clipping == 0.5


@pytest.mark.needs_extension("deepspeed_config")
def test_engine_config_fills_auto_with_numpy_numbers() -> None:
    file = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ("auto",)}}}
    with pytest.raises(ConfigError, match="betas"):
        load_engine_config(file, hyperparameters={"lr": np.float64(0.25)})
    file["optimizer"]["params"].pop("betas")  # type: ignore[attr-defined]
    config = load_engine_config(file, hyperparameters={"learning_rate": np.float64(0.25)})
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 0.25


def test_experiment_config_reads_python_values() -> None:
    config = load_experiment(
        {
            "entrypoint": ("python", "train.py"),
            "hyperparameters": {"lr": {"type": "categorical", "vals": np.array([0.1, 0.2])}},
            "searcher": {"name": "grid", "metric": "loss", "max_length": np.int64(3)},
        }
    )
    assert config.hyperparameters["lr"]["vals"] == [0.1, 0.2]
