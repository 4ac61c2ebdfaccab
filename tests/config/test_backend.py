"""`backend: deepspeed` in an experiment: what is checked before a real DeepSpeed reads on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment, check_file, load_engine_config, load_experiment
from zerolab.config.experiment.run_spec import sections_of
from zerolab.errors import ConfigError

EXPERIMENT: dict[str, Any] = {
    "backend": "deepspeed",
    "entrypoint": "model_def:T",
    "hyperparameters": {"deepspeed_config": "ds.json"},
    "searcher": {"name": "single", "metric": "loss", "max_length": 10},
    "resources": {"slots_per_trial": 2},
}
ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 4}},
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "reduce_bucket_size": "auto"},
}
MODEL = b"class T(ZeroTrial): ..."


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a package of that name where Python looks; nothing here imports it."""
    (tmp_path / "packages" / "deepspeed").mkdir(parents=True)
    (tmp_path / "packages" / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delenv("ZEROLAB_AS_DEEPSPEED", raising=False)


@pytest.fixture
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python's way to say that there is none
    monkeypatch.delenv("ZEROLAB_AS_DEEPSPEED", raising=False)


def check(engine: dict[str, Any], **fields: Any) -> list[str]:
    files = MemoryFiles({"ds.json": json.dumps(engine).encode(), "model_def.py": MODEL})
    try:
        check_experiment({**EXPERIMENT, **fields}, files)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.usefixtures("_installed")
def test_keys_that_only_deepspeed_has_are_left_to_it() -> None:
    assert check(ENGINE) == []
    refused = check(ENGINE, backend="zerolab")
    assert any("OneBitAdam" in line for line in refused)
    assert any("zero_hpz_partition_size" in line for line in refused)
    with pytest.raises(ConfigError):
        load_engine_config(ENGINE)


def test_zerolabs_own_engine_is_the_default_and_a_run_is_told() -> None:
    ours = load_experiment({key: EXPERIMENT[key] for key in EXPERIMENT if key != "backend"})
    assert (ours.backend, sections_of(ours)["backend"]) == ("zerolab", "zerolab")
    assert sections_of(load_experiment(EXPERIMENT))["backend"] == "deepspeed"
    with pytest.raises(ConfigError, match=r"backend: .*'zerolab' or 'deepspeed', got 'megatron'"):
        load_experiment({**EXPERIMENT, "backend": "megatron"})


@pytest.mark.usefixtures("_not_installed")
def test_where_deepspeed_is_not_installed_one_sentence_says_so() -> None:
    assert check(ENGINE) == [
        "backend: deepspeed needs the package deepspeed, which is not installed here; "
        "pip install 'zerolab[deepspeed]', or leave backend out to train with Zerolab's own engine"
    ]
    assert check(ENGINE, environment={"python": "/opt/other/bin/python"}) == []  # it may be there


@pytest.mark.usefixtures("_installed")
def test_what_deepspeed_would_not_explain_is_refused_all_at_once() -> None:
    engine = {**ENGINE, "train_batch_size": "auto", "scheduler": {"params": {"warmup": "auto"}}}
    fields = {
        "environment": {"deepspeed": "zerolab"},
        "resources": {"slots_per_trial": 2, "elastic": {"min_slots": 1}},
    }
    found = check(engine, **fields)
    assert [line.partition(": must")[0] for line in found] == [
        "environment.deepspeed",
        "resources.elastic",
        "ds.json: train_batch_size",
        "ds.json: scheduler.params.warmup",
    ]
    assert check(ENGINE, hyperparameters={"deepspeed_config": "no.json"}) == [
        "hyperparameters.deepspeed_config: must name a file in the model directory, "
        "got 'no.json', which is not there"
    ]
    assert check(ENGINE, entrypoint="python train.py")[0].startswith("backend: must be zerolab")


@pytest.mark.usefixtures("_installed")
def test_checking_a_file_says_who_reads_its_engine_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE))
    (tmp_path / "model_def.py").write_bytes(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    said = check_file(tmp_path / "experiment.yaml")
    assert "ds.json: left to DeepSpeed, which checks it when a trial starts" in said
