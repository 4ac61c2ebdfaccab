"""A new launcher is one file and one registration: the toy in ``toy_launcher.py``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.installation import Installation
from tests.launcher.toy_launcher import ToyLauncher
from tests.waiting import until
from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.launcher import registry
from zerolab.launcher.interface import LauncherFactory
from zerolab.launcher.registry import LAUNCHERS
from zerolab.linux import kill_tree

REGISTER_AND_START = """
import sys
from zerolab.launcher.registry import LAUNCHERS
from tests.launcher.toy_launcher import ToyLauncher
LAUNCHERS["toy"] = ToyLauncher  # the one line
from zerolab.cli.main import main
sys.argv = "zerolab agent start --launcher toy --cpu --slots 5 --name toy".split()
main()
"""

CONFIG: dict[str, Any] = {
    "entrypoint": [sys.executable, "script.py"],
    "searcher": {"name": "single", "metric": "loss"},
    "resources": {"slots_per_trial": 5},
}

SCRIPT = """
import os, pathlib
pathlib.Path(GATE).write_text(os.environ["TOY_SLOTS"])
"""


def test_launchers_implement_interface() -> None:
    makers: list[LauncherFactory] = [*LAUNCHERS.values(), ToyLauncher]
    verbs = ("keep_ready", "offers", "start", "stop", "sweep", "close")
    assert all(callable(getattr(maker, verb)) for maker in makers for verb in verbs)
    # Each is a separate file or package that only the registry imports.
    homes = {name: str(maker.__module__) for name, maker in LAUNCHERS.items()}  # type: ignore[attr-defined]
    parts = {name: home.removesuffix(".launcher") for name, home in homes.items()}
    assert parts == {
        "local": "zerolab.launcher.local",
        "slurm": "zerolab.extensions.launcher_slurm",
        "ssh": "zerolab.extensions.launcher_ssh",
    }
    sources = Path(registry.__file__).parents[1].rglob("*.py")
    for source in sources:
        text = source.read_text(encoding="utf-8")
        inside = f".{source.relative_to(Path(registry.__file__).parents[1])}".replace("/", ".")
        for part in parts.values():
            of_itself = f"zerolab{inside}".startswith(part)
            is_imported = f"from {part}." in text or f"from {part} " in text
            assert of_itself or source.samefile(registry.__file__) or not is_imported, source


@pytest.mark.processes
def test_agent_uses_new_launcher(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    files = {"script.py": SCRIPT.replace("GATE", repr(str(marker)))}
    with Installation.running(tmp_path / "home") as installation:
        environment = {
            **os.environ,
            ENV_HOME: str(tmp_path / "other"),
            ENV_MASTER: installation.client.url,
            ENV_TOKEN: installation.home.ensure_token(),
        }
        with subprocess.Popen([sys.executable, "-c", REGISTER_AND_START], env=environment) as agent:
            try:
                until("two agents", installation.client.agents, lambda agents: len(agents) == 2)
                number = installation.submit(tmp_path / "model", CONFIG, files)
                assert installation.wait_for(number)["state"] == "COMPLETED"
            finally:
                kill_tree(agent.pid)
    assert marker.read_text() == "5"


def test_invalid_launcher_options(tmp_path: Path) -> None:
    both = ["--resource-manager", "slurm.yaml", "--slots", "2", "--cpu", "--launcher", "ssh"]
    installation = Installation(tmp_path / "home")  # without a server: both are refused before
    done = installation.quick("agent", "start", "--launcher", "kubernetes", expect=2)
    refused = installation.quick("agent", "start", *both, expect=2)
    assert "must be one of local, slurm, ssh, got 'kubernetes'" in done.stderr
    for option in ("--slots", "--cpu", "--launcher"):
        assert f"{option}: cannot be combined with --resource-manager" in refused.stderr
