"""A searcher's class in the model directory, run by a real server."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.end_to_end.installation import Installation
from tests.waiting import DEADLINE_S, until
from zerolab.contract.spec import ENV_MASTER, ENV_TOKEN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiment_config.md"
TRAIN = """
import pathlib, time
import zerolab.core

with zerolab.core.init() as context:
    gate = pathlib.Path(context.info.config["data"]["gate"])
    while not gate.exists():
        time.sleep(0.02)
    context.train.report_validation_metrics(1, {"loss": context.train.get_hparams()["x"]})
"""


CLASS = "my_search:MySearch"


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with Installation.running(tmp_path / "home", slots=1) as made:
        yield made


def submit(
    installation: Installation, folder: Path, code: str, entrypoint: str | None = CLASS
) -> int:
    """Submit a search whose trials train as soon as there is a file ``gate`` in its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "my_search.py").write_text(code)
    (folder / "train.py").write_text(TRAIN)
    content = {
        "entrypoint": "python train.py",
        "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "custom", "entrypoint": entrypoint, "metric": "loss",
            "options": {"goal": 0.5},
        },
        "data": {"gate": str(folder / "gate")},
        "reproducibility": {"experiment_seed": 5},
    }  # fmt: skip
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    return int(installation.cli("submit", folder / "experiment.yaml").stdout)


def wait_for_trial(installation: Installation, experiment_id: int) -> None:
    """Wait until its first trial has a run: its searcher has decided something."""
    until(
        f"a trial of experiment {experiment_id} has a run",
        lambda: installation.client.trials(experiment_id),
        lambda trials: any(trial["run_id"] for trial in trials),
    )


def searcher_of(installation: Installation, experiment_id: int) -> psutil.Process:
    """The process that the server runs for an experiment's class."""
    words = ["zerolab.client.search", str(experiment_id)]

    def found() -> list[psutil.Process]:
        there = []
        for process in psutil.Process(installation.server_pid).children():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                at = line.index(words[0]) if words[0] in line else len(line)
                if line[at : at + 2] == words:
                    there.append(process)
        return there

    (process,) = until("the searcher runs", found, lambda processes: len(processes) == 1)
    return process


@pytest.mark.processes
def test_a_custom_search_outlives_the_death_of_its_process_and_not_its_own_mistakes(
    installation: Installation, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    good, remote = tmp_path / "good", tmp_path / "remote"
    experiment_id = submit(installation, good, code)
    wait_for_trial(installation, experiment_id)
    killed = searcher_of(installation, experiment_id)
    killed.kill()
    killed.wait()
    (good / "gate").touch()  # what follows is told to another process, which was told all before
    ended = installation.wait_for(experiment_id)
    assert ended["state"] == "COMPLETED", ended["error"]
    found = installation.client.trials(experiment_id)
    losses = [trial["best_validation"] for trial in found]
    assert losses
    assert losses[-1] <= 0.5
    assert all(loss > 0.5 for loss in losses[:-1])

    # A program outside, of which the server knows nothing, decides the same; killed as well.
    served = submit(installation, remote, code, None)
    words = [sys.executable, "-m", "zerolab.client.search", str(served), CLASS]
    address = {ENV_MASTER: installation.client.url, ENV_TOKEN: installation.home.ensure_token()}
    environment = installation.environment() | address
    for life in range(2):
        program = subprocess.Popen(words, cwd=remote, env=environment)
        try:
            wait_for_trial(installation, served)
            if life:
                (remote / "gate").touch()
                assert installation.wait_for(served)["state"] == "COMPLETED"
                assert program.wait(DEADLINE_S) == 0
        finally:
            program.kill()
            program.wait()
    again = installation.client.trials(served)
    names = ("hparams", "seed", "state", "best_validation")
    assert [[trial[name] for name in names] for trial in again] == [
        [trial[name] for name in names] for trial in found
    ]

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "gate").touch()
    wrong = code.replace('block["options"]["goal"]', 'block["goal"]')
    ended = installation.wait_for(submit(installation, tmp_path / "bad", wrong))
    assert ended["state"] == "ERROR"
    assert ended["error"] == "searcher.entrypoint: its class failed: KeyError: 'goal'"
