"""Required torch versions of engine configurations, and `config check --torch`."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zerolab.config import check_file, load_engine_config
from zerolab.errors import ConfigError
from zerolab.extensions.config_checks.torch_versions import OLDEST_TORCH, torch_problems

ROOT = Path(__file__).resolve().parents[2]
BATCH: dict[str, Any] = {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("block", "oldest"),
    [
        ({"zero_optimization": {"stage": 2}}, "2.6"),
        ({"zero_optimization": {"stage": 3}}, "2.7"),
        ({"pipeline": {"stages": 2}}, "2.7"),
        ({"tensor_parallel": {"size": 2, "plan": {"a": "colwise"}}}, "2.7"),
        ({"optimizer": {"type": "Muon"}}, "2.9"),
    ],
)
def test_oldest_torch_of_a_key(block: dict[str, Any], oldest: str) -> None:
    config = load_engine_config({**BATCH, **block})
    major, minor = map(int, oldest.split("."))
    assert torch_problems(config, f"{oldest}.1+cu126") == []
    assert torch_problems(config, "2.15.0") == []
    (problem,) = torch_problems(config, f"{major}.{minor - 1}.0")[-1:]
    assert f"{oldest} or newer, got" in problem
    assert "; install a newer torch" in problem


def test_pipeline_module_needs_a_newer_torch() -> None:
    config = load_engine_config(BATCH)
    assert torch_problems(config, "2.6.0", pipeline_stages=1) == []
    assert "pipeline.stages: 2 needs torch 2.7" in torch_problems(config, "2.6.0", 2)[0]


@pytest.mark.needs_extension("Muon")
def test_all_keys_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    blocks = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon", "params": {}}}
    file.write_text(json.dumps({**BATCH, **blocks}))
    with pytest.raises(ConfigError) as raised:
        check_file(file, torch="2.5.1")
    text = str(raised.value)
    assert "torch: must be 2.6 or newer, got 2.5.1" in text
    assert "zero_optimization.stage: 3 needs torch 2.7" in text
    assert "optimizer.type: Muon needs torch 2.9" in text
    assert "ok for 1" in check_file(file, torch="2.9.1")


def test_invalid_torch_version_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(BATCH))
    with pytest.raises(ConfigError, match=r"torch: must be a version such as 2\.11\.0, got 'new'"):
        check_file(file, torch="new")


def test_package_requires_the_same_oldest_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (
        dependency for dependency in project["dependencies"] if dependency.startswith("torch")
    )
    assert re.search(r">=(\d+)\.(\d+)", line).groups() == tuple(map(str, OLDEST_TORCH))  # type: ignore[union-attr]
