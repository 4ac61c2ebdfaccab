"""Extensions of a separate distribution: installed with pip, then used end to end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.end_to_end.installation import Installation
from tests.extensions.distributions import install
from tests.waiting import DEADLINE_S, until
from zerolab.linux import kill_tree

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "contribute" / "extending.md").read_text("utf-8"),
    re.M | re.S,
)
MODULES = {
    **dict(zip(
        [
            "my_searcher.py", "my_schedule.py", "my_optimizer.py", "my_engine.py", "my_command.py",
            "my_routes.py", "my_storage.py",
        ],
        BLOCKS, strict=True,
    )),
    "toy_launcher.py": (ROOT / "tests" / "launcher" / "toy_launcher.py").read_text("utf-8"),
}  # fmt: skip
"""The examples of the documentation."""
ENTRY_POINTS = {
    "zerolab.searchers": {"first_good": "my_searcher:FirstGoodConfig"},
    "zerolab.launchers": {"toy": "toy_launcher:ToyLauncher"},
    "zerolab.commands": {"runs": "my_command:count"},
    "zerolab.storage_backends": {"archive": "my_storage:ArchiveConfig"},
    "zerotrial.lr_schedules": {"HalvingLR": "my_schedule:HalvingLR"},
    "zerotrial.engine_extensions": {"count": "my_engine:ParameterCount"},
    "zerotrial.optimizers": {"SignSGD": "my_optimizer:SignSGD"},
    "zeroserver.routers": {"names": "my_routes:router"},
}
TRIAL = """
import torch
import zerotrial
from zerotrial import DataLoader, ZeroTrial


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(2)


class Trial(ZeroTrial):
    def __init__(self, context):
        model = torch.nn.Linear(2, 1)
        engine, *_ = zerotrial.initialize(
            model=model, model_parameters=model.parameters(), config="ds_config.json"
        )
        self.context = context
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        return DataLoader(Data(), batch_size=4)

    def build_validation_data_loader(self):
        return DataLoader(Data(), batch_size=4)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.engine(next(dataloader_iter)).pow(2).mean()
        lr = self.engine.get_lr()[0]
        self.engine.backward(loss)
        self.engine.step()
        trained = self.engine.trained_parameters()
        return {"loss": loss, "learning_rate": lr, "trained": trained}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"val_loss": self.engine(next(dataloader_iter)).pow(2).mean()}
"""
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SignSGD", "params": {"lr": 0.1}},
    "scheduler": {"type": "HalvingLR", "params": {"halve_every": 2}},
}
EXPERIMENT: dict[str, Any] = {
    "name": "toy parts",
    "entrypoint": "model_def:Trial",
    "max_restarts": 0,
    "searcher": {
        "name": "first_good", "metric": "val_loss", "max_length": {"batches": 4}, "goal": 1e9,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "site"
    install(folder, "zerolab_toy", MODULES, ENTRY_POINTS)
    return folder


@pytest.fixture(scope="module")
def installation(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        with Installation.running(tmp_path_factory.mktemp("home") / "home") as installation:
            yield installation


def write_experiment(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model_def.py").write_text(TRIAL)
    (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG | changes))
    (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return folder / "experiment.yaml"


@pytest.mark.processes
def test_searcher_schedule_and_optimizer_train(installation: Installation, tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "model")
    checked = installation.cli("config", "check", experiment.parent / "ds_config.json")
    assert "HalvingLR" in checked.stdout
    number = int(installation.cli("submit", experiment).stdout.split()[-1])
    assert installation.wait_for(number)["state"] == "COMPLETED"
    (trial,) = installation.client.trials(number)
    (trained,) = installation.client.metrics(trial["id"], "training", ["trained"])
    assert {value for _, value in trained["points"]} == {3}
    (curve,) = installation.client.metrics(trial["id"], "training", ["learning_rate"])
    # Halved after two steps; the last two steps are one point.
    assert [value for _, value in curve["points"]] == pytest.approx([0.1, 0.1, 0.05])


@pytest.mark.processes
def test_storage_backend_keeps_and_restores_checkpoints(
    installation: Installation, tmp_path: Path
) -> None:
    experiment = write_experiment(tmp_path / "model")
    model = experiment.parent / "model_def.py"
    crash = "    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):\n"
    assert crash in TRIAL
    marker = str(tmp_path / "crashed")
    model.write_text(TRIAL.replace(crash, crash + CRASH.format(marker)))
    storage = {"type": "archive", "archive_path": str(tmp_path / "archive")}
    block = EXPERIMENT | {
        "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 4}},
        "min_checkpoint_period": {"batches": 2},
        "max_restarts": 1,
        "checkpoint_storage": storage,
    }
    experiment.write_text(yaml.safe_dump(block))
    number = int(installation.cli("submit", experiment).stdout.split()[-1])
    assert installation.wait_for(number)["state"] == "COMPLETED"
    assert Path(marker).read_text() == "2"
    (trial,) = installation.client.trials(number)
    assert len(installation.client.runs(trial["id"])) == 2
    stored = {path.name for path in (tmp_path / "archive").iterdir()}
    (uuid,) = [
        checkpoint["uuid"]
        for checkpoint in installation.client.experiment_checkpoints(number)
        if checkpoint["state"] == "COMPLETED"
    ]
    assert stored == {uuid}
    installation.cli("checkpoint", "download", uuid, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "checkpoint.json").read_text())["steps_completed"] == 4
    refused = yaml.safe_dump(block | {"checkpoint_storage": {"type": "archive"}})
    experiment.write_text(refused)
    problem = "checkpoint_storage.archive_path: is required for type 'archive', got nothing"
    assert problem in installation.cli("config", "check", experiment, expect=2).stderr


CRASH = """
        from pathlib import Path
        marker = Path({!r})
        if batch_idx == 2 and not marker.exists():
            marker.write_text(str(batch_idx))
            raise RuntimeError("once")
"""


@pytest.mark.processes
def test_arguments_are_checked(installation: Installation, tmp_path: Path) -> None:
    schedule = {"type": "halvinglr", "params": {"halve_every": 0}}
    write_experiment(tmp_path / "model", scheduler=schedule)
    path = tmp_path / "model" / "ds_config.json"
    refused = installation.cli("config", "check", path, expect=2)
    assert "scheduler.params.halve_every: must be greater than 0, got 0" in refused.stderr


@pytest.mark.processes
def test_launcher_runs_an_experiment(installation: Installation, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerolab", "agent", "start", "--launcher", "toy"]
    environment = {
        **installation.environment(),
        "ZEROLAB_MASTER": installation.client.url,
        "ZEROLAB_TOKEN": installation.home.ensure_token(),
    }
    with subprocess.Popen(
        [*command, "--cpu", "--slots", "5", "--name", "toy"], env=environment
    ) as agent:
        try:
            until("two agents", installation.client.agents, lambda agents: len(agents) == 2)
            script = "import os, pathlib; pathlib.Path({!r}).write_text(os.environ['TOY_SLOTS'])"
            result = tmp_path / "slots"
            number = installation.submit(
                tmp_path / "model",
                {
                    "entrypoint": [sys.executable, "script.py"],
                    "searcher": {"name": "single"},
                    "resources": {"slots_per_trial": 5},
                },
                {"script.py": script.format(str(result))},
            )
            assert installation.wait_for(number)["state"] == "COMPLETED"
            assert result.read_text() == "5"
        finally:
            kill_tree(agent.pid)


@pytest.mark.processes
def test_command_and_route(installation: Installation, tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "model")
    number = int(installation.cli("submit", experiment).stdout.split()[-1])
    installation.wait_for(number)
    assert installation.cli("runs", str(number)).stdout == "1 runs\n"
    assert "Print the number of runs of an experiment" in installation.cli("--help").stdout
    url = f"{installation.client.url}/api/v1/extensions/names"
    owner = {"Authorization": f"Bearer {installation.home.ensure_token()}"}
    assert httpx.get(url).status_code == 401
    assert "toy parts" in httpx.get(url, headers=owner).json()


BROKEN = {
    "zerolab.searchers": {"broken": "toy_broken:Missing"},
    "zerolab.commands": {"broken": "toy_broken:app", "runs": "toy_broken:app"},
    "zerotrial.lr_schedules": {"BrokenLR": "toy_broken:NotASchedule"},
    "zeroserver.routers": {"broken": "toy_broken:NotASchedule"},
}


@pytest.mark.processes
def test_broken_extensions_are_named(folder: Path, tmp_path: Path) -> None:
    modules = {"toy_broken.py": "import not_installed\n"}
    other = tmp_path / "site"
    install(other, "zerolab_broken", modules, BROKEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(other)])}

    def zerolab(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zerolab", *arguments],
            capture_output=True, text=True, env=environment, check=False, timeout=DEADLINE_S,
        )  # fmt: skip

    assert zerolab("--help").returncode == 0
    problem = "zerolab_broken provides it as toy_broken"
    for arguments, key in {
        ("broken",): "broken",
        ("config", "check", str(_searcher(tmp_path, "broken"))): "searcher.name",
        ("config", "check", str(_schedule(tmp_path, "BrokenLR"))): "scheduler.type",
    }.items():
        done = zerolab(*arguments)
        assert done.returncode == 2
        assert key in done.stderr
        assert problem in done.stderr
        assert "No module named 'not_installed'" in done.stderr
    twice = zerolab("runs", "1")
    assert twice.returncode == 2
    assert "is registered by zerolab_broken and zerolab_toy; uninstall one" in twice.stderr


def _searcher(folder: Path, name: str) -> Path:
    path = folder / "experiment.yaml"
    searcher = EXPERIMENT["searcher"] | {"name": name}
    path.write_text(yaml.safe_dump(EXPERIMENT | {"searcher": searcher}))
    (folder / "model_def.py").touch()
    return path


def _schedule(folder: Path, name: str) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(DS_CONFIG | {"scheduler": {"type": name}}))
    return path
