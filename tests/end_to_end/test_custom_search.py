"""Custom searcher class in the model directory, run by a real server."""

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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "experiment_config.md"
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
    with Installation.running(tmp_path / "home", slots=1) as installation:
        yield installation


def submit(
    installation: Installation, folder: Path, code: str, entrypoint: str | None = CLASS
) -> int:
    """Submit a search whose trials wait for a file ``gate`` in its folder."""
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
    return int(installation.quick("submit", folder / "experiment.yaml").stdout)


def wait_for_trial(installation: Installation, experiment_id: int) -> None:
    """Wait until a trial of the experiment has a run."""
    until(
        f"a trial of experiment {experiment_id} has a run",
        lambda: installation.client.trials(experiment_id),
        lambda trials: any(trial["run_id"] for trial in trials),
    )


def find_searcher_process(installation: Installation, experiment_id: int) -> psutil.Process:
    """Return the process that the server runs for an experiment's searcher class."""
    command = ["zerolab.client.search", str(experiment_id)]

    def candidates() -> list[psutil.Process]:
        matches = []
        for process in psutil.Process(installation.server_pid).children():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                index = line.index(command[0]) if command[0] in line else len(line)
                if line[index : index + 2] == command:
                    matches.append(process)
        return matches

    (process,) = until("the searcher runs", candidates, lambda processes: len(processes) == 1)
    return process


@pytest.mark.processes
def test_custom_search_survives_kill_but_not_errors(
    installation: Installation, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    class_directory, remote_directory = tmp_path / "good", tmp_path / "remote"
    experiment_id = submit(installation, class_directory, code)
    wait_for_trial(installation, experiment_id)
    searcher_process = find_searcher_process(installation, experiment_id)
    searcher_process.kill()
    searcher_process.wait()
    (class_directory / "gate").touch()  # a new process gets all earlier events, then the next ones
    experiment = installation.wait_for(experiment_id)
    assert experiment["state"] == "COMPLETED", experiment["error"]
    trials = installation.client.trials(experiment_id)
    losses = [trial["best_validation"] for trial in trials]
    assert losses
    assert losses[-1] <= 0.5
    assert all(loss > 0.5 for loss in losses[:-1])

    # An external program, not started by the server, decides the same; it is killed as well.
    served = submit(installation, remote_directory, code, None)
    command = [sys.executable, "-m", "zerolab.client.search", str(served), CLASS]
    address = {ENV_MASTER: installation.client.url, ENV_TOKEN: installation.home.ensure_token()}
    environment = installation.environment() | address
    for attempt in range(2):
        program = subprocess.Popen(command, cwd=remote_directory, env=environment)
        try:
            wait_for_trial(installation, served)
            if attempt:
                (remote_directory / "gate").touch()
                assert installation.wait_for(served)["state"] == "COMPLETED"
                assert program.wait(DEADLINE_S) == 0
        finally:
            program.kill()
            program.wait()
    served_trials = installation.client.trials(served)
    names = ("hparams", "seed", "state", "best_validation")
    assert [[trial[name] for name in names] for trial in served_trials] == [
        [trial[name] for name in names] for trial in trials
    ]

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "gate").touch()
    bad_code = code.replace('block["options"]["goal"]', 'block["goal"]')
    experiment = installation.wait_for(submit(installation, tmp_path / "bad", bad_code))
    assert experiment["state"] == "ERROR"
    assert experiment["error"] == "searcher.entrypoint: its class failed: KeyError: 'goal'"
