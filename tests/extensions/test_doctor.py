"""``zerolab doctor``, ``--version``, ``logs`` and suggestions for mistyped commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.waiting import free_port
from zerolab import __version__
from zerolab.cli.main import app


def doctor(home: Path, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command; return its exit code and the checks by name."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("ZEROLAB_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "zerolab", "doctor", "--json"],
        env={**inherited, "ZEROLAB_HOME": str(home), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_doctor_without_server(tmp_path: Path) -> None:
    code, checks = doctor(tmp_path / "home")
    assert code == 0, checks
    assert sys.executable in checks["python"]["detail"]
    assert __version__ in checks["zerolab"]["detail"]
    assert "gloo" in checks["torch"]["detail"]
    assert "not started" in checks["server"]["detail"]
    assert {"GPUs", "CPU cores", "disk", "memory", "port 8080", "data directory"} <= set(checks)
    assert not (tmp_path / "home").exists()


def test_doctor_reports_unresponsive_server(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, checks = doctor(tmp_path, ZEROLAB_MASTER=url)
    assert code == 1
    assert checks["server"]["state"] == "problem"
    assert url in checks["server"]["detail"]
    assert "zerolab up" in checks["server"]["remedy"]


def test_doctor_reports_broken_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    code, checks = doctor(tmp_path / "home", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "libcudart.so.13 is missing" in checks["torch"]["detail"]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_option(option: str) -> None:
    done = CliRunner().invoke(app, [option])
    assert (done.exit_code, done.output.strip()) == (0, __version__)


@pytest.mark.parametrize("word", ["lost", "logot", "logoot", "logou"])
def test_logout_is_never_suggested(word: str) -> None:
    done = CliRunner().invoke(app, [word, "3"])
    assert done.exit_code == 2
    assert "logout" not in done.output


def test_mistyped_command_is_suggested() -> None:
    assert "Did you mean 'list'" in CliRunner().invoke(app, ["experiment", "lst"]).output
    assert "Did you mean 'submit'" in CliRunner().invoke(app, ["sumbit"]).output
