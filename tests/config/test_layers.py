"""Experiment files with bases, and files and values that override them."""

from pathlib import Path

import pytest

from zerolab.cli.config_overrides import read_overrides
from zerolab.cli.submit import read_submission
from zerolab.config import check_file, load_experiment
from zerolab.errors import ConfigError

BASE = """
environment: {environment_variables: [HF_TOKEN=abc]}
resources: {slots_per_trial: 2, priority: 40}
searcher: {name: random, metric: loss, max_trials: 4}
hyperparameters: {lr: {type: log, min: 0.001, max: 0.1}, hidden: 8}
"""
EXPERIMENT = """
extends: ../base.yaml
name: small
entrypoint: python train.py
searcher: {max_trials: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "experiment.yaml").write_text(EXPERIMENT)
    (tmp_path / "model" / "train.py").write_text("print('training')")
    return tmp_path


def test_submission_merges_bases_files_and_values(folder: Path) -> None:
    first, second = folder / "first.yaml", folder / "second.yaml"
    first.write_text("{name: first, max_restarts: 1, resources: {priority: 30}}")
    second.write_text("{extends: third.yaml, name: second}")
    (folder / "third.yaml").write_text("{name: third, resources: {weight: 2}}")
    values = ["hyperparameters.lr=1e-3", "max_restarts=0"]
    content, _ = read_submission(folder / "model", None, [first, second], values)
    assert "extends" not in content
    assert content["name"] == "second"
    assert content["max_restarts"] == 0
    assert content["resources"] == {"slots_per_trial": 2, "priority": 30, "weight": 2}
    assert content["searcher"] == {"name": "random", "metric": "loss", "max_trials": 2}
    assert content["hyperparameters"] == {"lr": 0.001, "hidden": 8}


def test_later_bases_override_earlier_ones(folder: Path) -> None:
    (folder / "quick.yaml").write_text("{extends: base.yaml, searcher: {max_trials: 1}}")
    file = folder / "model" / "experiment.yaml"
    file.write_text("{extends: [../base.yaml, ../quick.yaml], entrypoint: python train.py}")
    assert load_experiment(file).searcher.max_trials == 1


@pytest.mark.parametrize(
    ("extends", "problem"),
    [
        ("3", r"extends: must be the path of a file or a list of them, got 3"),
        ("[../base.yml]", r"extends: file: must exist, got 'base.yml'.* did you mean 'base.yaml'"),
        ("experiment.yaml", r"must not lead back .*experiment.yaml -> experiment.yaml; remove"),
        ("../loop.yaml", r"got experiment.yaml -> loop.yaml -> experiment.yaml"),
    ],
)
def test_invalid_bases_are_refused(folder: Path, extends: str, problem: str) -> None:
    (folder / "loop.yaml").write_text("extends: [base.yaml, model/experiment.yaml]")
    file = folder / "model" / "experiment.yaml"
    file.write_text(f"{{extends: {extends}, entrypoint: python train.py}}")
    with pytest.raises(ConfigError, match=problem):
        load_experiment(file)


def test_unresolved_extends_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="extends: must be merged before the submission"):
        load_experiment({"extends": "a.yaml", "entrypoint": "x", "searcher": {"name": "single"}})


def test_check_shows_origin_of_settings(folder: Path) -> None:
    overrides = read_overrides(None, ["resources.priority=10"])
    report = check_file(folder / "model", overrides=overrides).splitlines()
    settings = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in report[2:]}
    assert settings["name"].split() == ["small", f"({folder}/model/experiment.yaml)"]
    assert settings["searcher.metric"].split() == ["loss", f"({folder}/model/../base.yaml)"]
    assert settings["resources.priority"].split() == ["10", "(--set)"]
    assert settings["max_restarts"].split() == ["5", "(default)"]
    assert "HF_TOKEN=********" in settings["environment.environment_variables.cuda"]


def test_check_overrides_engine_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8}')
    report = check_file(file, 2, overrides=read_overrides(None, ["train_batch_size=16"]))
    assert "train_micro_batch_size_per_gpu = 8" in report
    with pytest.raises(ConfigError, match="did you mean 'train_batch_size'"):
        check_file(file, overrides=read_overrides(None, ["train_batch_siz=16"]))
