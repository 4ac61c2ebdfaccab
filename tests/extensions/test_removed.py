"""The server and the command line without any of our extensions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REQUESTS = """
import sys
from pathlib import Path
from fastapi.testclient import TestClient
from zeroserver.app import create_app
from zeroserver.settings import Settings

app = create_app(Settings(home=Path(sys.argv[1])))
with TestClient(app, base_url="http://127.0.0.1") as client:
    token = app.state.services.orchestrator.home.read_token()
    for path in ("experiments", "info", "models"):
        answer = client.get(f"/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})
        print(answer.status_code, answer.text)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes that use a copy of the core alone."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("platform", "trials", "server"):
        for package in (ROOT / folder).glob("zero*/"):
            target = tmp_path / folder / package.name
            shutil.copytree(package, target, ignore=shutil.ignore_patterns("static", "extensions"))
    paths = [str(tmp_path / folder) for folder in ("platform", "trials", "server")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.processes
def test_core_runs_and_names_removed_extensions(
    environment: dict[str, str], tmp_path: Path
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = run("-c", REQUESTS, str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    experiments, info, models = done.stdout.splitlines()
    assert experiments.startswith("200")
    assert info.startswith("200")
    assert models.startswith("404")
    assert "'model_registry' is provided by zeroserver.extensions.model_registry" in models
    command = run("-m", "zerolab", "model", "list")
    assert command.returncode == 2
    assert "'model' is provided by zeroserver.extensions.model_registry" in command.stderr
    assert run("-m", "zerolab", "--help").returncode == 0
