"""Experiments with a hostfile: resolved hosts, and all problems at once."""

from pathlib import Path
from typing import Any

import pytest

from zerolab.config.experiment.experiment_config import ExperimentConfig, load_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.config.experiment.run_spec import run_spec_fields
from zerolab.config.validation import check_experiment, with_ranks
from zerolab.contract.spec import HostSlots
from zerolab.errors import ConfigError
from zeroserver.orchestrator.experiment_service import resource_columns

ENGINE = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("worker-1 slots=2\nme@worker-2 slots=2\n")
    return tmp_path


def check(folder: Path, **resources: Any) -> ExperimentConfig:
    file = {
        "entrypoint": "python train.py",
        "hyperparameters": {"deepspeed_config": ENGINE},
        "searcher": {"name": "single", "metric": "loss"},
        "resources": resources,
    }
    return check_experiment(file, FolderFiles(folder))


def problems(folder: Path, **resources: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check(folder, **resources)
    return refused.value.problems


def test_hostfile_filters_define_ranks(folder: Path) -> None:
    config = check(folder, hostfile="hosts", exclude="me@worker-2:0", ssh_config="/etc/ssh/x")
    assert config.resources.hosts == {"worker-1": [0, 1], "me@worker-2": [1]}
    assert config.resources.slots_per_trial == 3
    reloaded = load_experiment(config.to_dict())
    assert reloaded.resources == config.resources
    sections = run_spec_fields(reloaded)
    assert sections["hosts"] == (HostSlots("worker-1", (0, 1)), HostSlots("me@worker-2", (1,)))
    assert sections["ssh_config"] == "/etc/ssh/x"
    assert sections["fewer"] == ()
    assert run_spec_fields(check(folder, slots_per_trial=2))["hosts"] == ()


def test_with_ranks_drops_hostfile(folder: Path) -> None:
    file = {"resources": {"hostfile": "hosts", "include": "worker-1", "priority": 7}, "name": "n"}
    expected = {"resources": {"priority": 7, "slots_per_trial": 8}, "name": "n"}
    assert with_ranks(file, 8) == expected
    assert with_ranks({}, 2) == {"resources": {"slots_per_trial": 2}}


def test_elastic_hostfile_allows_fewer_ranks(
    folder: Path,
) -> None:
    config = check(folder, hostfile="hosts", exclude="me@worker-2:0", elastic={"min_slots": 1})
    sections = run_spec_fields(load_experiment(config.to_dict()))
    assert sections["fewer"] == (2, 1)
    columns = resource_columns(config)
    assert (columns["slots"], columns["fewer_slots"]) == (1, "[]")  # of the agent: one, not fewer
    (problem,) = problems(folder, hostfile="hosts", include="worker-1", elastic={"min_slots": 3})
    assert problem == "resources.elastic.min_slots: must be at most slots_per_trial = 2, got 3"


def test_batch_must_divide_over_hosts(folder: Path) -> None:
    (problem,) = problems(folder, hostfile="hosts")
    assert "train_batch_size" in problem
    assert "12" in problem


@pytest.mark.parametrize(
    ("resources", "problem"),
    [
        ({"hostfile": "none"}, ["resources.hostfile: must name a file in the model directory"]),
        ({"hostfile": "../hosts"}, ["resources.hostfile: must be a path inside the model"]),
        ({"hostfile": "bad"}, [
            "resources.hostfile: bad: line 1: must look like `HOST slots=N`",
            "resources.hostfile: bad: line 3: b occurs a second time",
        ]),
        ({"hostfile": "none", "include": "a", "exclude": "b"}, [
            "resources.hostfile: must name a file in the model directory",
            "resources.include and exclude: only one of them may be given",
        ]),
        ({"hostfile": "hosts", "include": "worker-9@worker-1:7"}, [
            "resources.include: 'worker-9' is not in the hostfile (worker-1, me@worker-2)",
            "resources.include: worker-1 has slots 0 to 1, got 7",
        ]),
        ({"hostfile": "hosts", "include": "worker-1", "exclude": "worker-1"},
         ["resources.include and exclude: only one of them may be given"]),
        ({"hostfile": "hosts", "exclude": "me@worker-2@worker-1"},
         ["resources.hostfile: hosts: no slot is left"]),
        ({"hostfile": "hosts", "include": "worker-1", "slots_per_trial": 3},
         ["resources.slots_per_trial: must be 2, the slots that hosts and the filters leave"]),
        ({"hostfile": "hosts", "exclude": "worker-1:0", "ssh_config": "none", "max_nodes": 2,
          "max_slots": 4, "elastic": {"min_slots": 1}}, [
            "resources.max_nodes: must be left out, got 2",
            "resources.max_slots: must be left out, got 4",
            "resources.ssh_config: must name a file in the model directory, got 'none'",
        ]),
        ({"include": "worker-1", "ssh_config": "x"}, [
            "resources.include: goes with resources.hostfile, got 'worker-1' without one",
            "resources.ssh_config: goes with resources.hostfile, got 'x' without one",
        ]),
    ],
)  # fmt: skip
def test_all_hostfile_problems_are_reported(
    folder: Path, resources: dict[str, Any], problem: list[str]
) -> None:
    (folder / "bad").write_text("worker-1\nb slots=1\nb slots=2\n")
    config = problems(folder, **resources)
    assert len(config) == len(problem), config
    for line, expected in zip(config, problem, strict=True):
        assert line.startswith(expected)
