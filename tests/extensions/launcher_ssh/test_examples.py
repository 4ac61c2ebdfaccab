"""Examples that are plain scripts run under ``zerolab launch``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    "script",
    [file for file in EXAMPLES.glob("*/*.py") if "argparse.ArgumentParser(" in file.read_text()],
    ids=lambda file: file.parent.name,
)
def test_examples_accept_local_rank(script: Path) -> None:
    assert '"--local_rank"' in script.read_text()


@pytest.mark.soak
def test_pipeline_example_runs_under_launch(tmp_path: Path) -> None:
    folder = EXAMPLES / "pipeline_cifar"
    arguments = ["launch", "--cpu", "--num_gpus", "2", "--log-dir", str(tmp_path), "train.py"]
    arguments += ["--deepspeed_config", "ds_config.json", "-p", "2", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "zerolab", *arguments],
        cwd=folder, env={**os.environ, "ZEROLAB_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
