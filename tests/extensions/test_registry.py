"""Broken extensions: each is reported where it is used, everything else works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

MODULES = {
    "raises.py": "raise RuntimeError('no driver')",
    "typo.py": "def (:",
    "leaves.py": "import sys; sys.exit('bye')",
    "package/__init__.py": "raise ValueError('too old')",
    "package/part.py": "",
    "module.py": "",
    "routes.py": """
from fastapi import APIRouter

socket, mounted = APIRouter(), APIRouter()


@socket.websocket("/api/v1/extensions/socket")
async def talk(websocket):
    pass


mounted.mount("/api/v1/extensions/app", lambda: None)
""",
}
VALUES = {
    "raises:X": "RuntimeError: no driver",
    "typo:X": "SyntaxError: invalid syntax",
    "leaves:X": "SystemExit: bye",
    "package.part:X": "ValueError: too old",
    "module:X": "has no attribute 'X'",
    "module": "must be ",
    "not a module!": "must be module:object",
}
GROUPS = ("searchers", "launchers", "commands")
PRINT = """
from zerolab.cli.groups import COMMANDS
from zerolab.launcher.registry import LAUNCHERS
from zerolab.searcher.registry import SEARCHERS
for registry in SEARCHERS, LAUNCHERS, COMMANDS:
    assert registry.loadable().keys() == registry.keys() - {f"bad{i}" for i in range(9)}
    for i in range(COUNT):
        print(registry.problem(f"bad{i}"))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that has a distribution with broken extensions."""
    folder = tmp_path_factory.mktemp("site")
    points = "".join(
        f"[zerolab.{group}]\n" + "".join(f"bad{i} = {v}\n" for i, v in enumerate(VALUES))
        for group in GROUPS
    )
    points += "[zeroserver.routers]\nsocket = routes:socket\nmounted = routes:mounted\n"
    points += "gone = raises:X\n"
    files = {
        **MODULES,
        "odd-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n",
        "odd-1.0.dist-info/entry_points.txt": points,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    root = Path(__file__).parents[2]
    paths = [*(str(root / part) for part in ("platform", "trials", "server")), str(folder)]
    home = str(tmp_path_factory.mktemp("home"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ZEROLAB_HOME": home}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.processes
def test_each_broken_extension_has_a_problem(environment: dict[str, str]) -> None:
    completed = run(environment, "-c", PRINT.replace("COUNT", str(len(VALUES))))
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert len(lines) == len(GROUPS) * len(VALUES)
    for line, (value, reason) in zip(lines, [*VALUES.items()] * len(GROUPS), strict=True):
        assert f"odd provides it as {value}, which cannot be used: " in line
        assert reason in line


REMOVED = {
    "checkpoint_storage.type: 's3' is provided by zerolab.extensions.storage_objects.section",
    "data.stage: 'stage' is provided by zerolab.extensions.staging.launcher_hooks",
    "tensor_parallel.size: 'tensor_parallel' is provided by zerotrial.extensions.tensor_parallel.",
    "pipeline.stages: 'pipeline' is provided by zerotrial.extensions.pipeline.engine",
    "zero_optimization.offload_optimizer.device: 'nvme_optimizer' is provided by zerotrial.ext",
    "wall_clock_breakdown: 'profiler' is provided by zerotrial.extensions.profiler.step_observer",
}
EXPERIMENT = {
    "entrypoint": ["true"],
    "searcher": {"name": "single"},
    "resources": {"slots_per_trial": 4},
    "checkpoint_storage": {"type": "s3", "bucket": "models"},
    "data": {"stage": {"from": "/a", "to": "/b"}},
    "hyperparameters": {
        "deepspeed_config": {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "tensor_parallel": {"size": 2},
            "pipeline": {"stages": 2},
            "wall_clock_breakdown": True,
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
        }
    },
}


@pytest.mark.processes
def test_removed_extensions_are_named(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ignored = shutil.ignore_patterns("extensions", "__pycache__")
    for package in ("platform", "trials"):
        shutil.copytree(root / package, tmp_path / package, ignore=ignored)
    shutil.copy(root / "pyproject.toml", tmp_path)
    paths = os.pathsep.join(str(tmp_path / package) for package in ("platform", "trials"))
    environment = {**os.environ, "PYTHONPATH": paths}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    file = str(tmp_path / "experiment.yaml")
    checked = run(environment, "-m", "zerolab", "config", "check", file)
    assert checked.returncode == 2
    for problem in REMOVED:
        assert problem in checked.stderr
    planned = run(environment, "-m", "zerolab", "plan", file)
    assert planned.returncode == 2
    assert "'plan' is provided by zerotrial.extensions.planner.command, which is" in planned.stderr


@pytest.mark.processes
def test_broken_extensions_do_not_stop_commands(environment: dict[str, str]) -> None:
    assert run(environment, "-m", "zerolab", "--help").returncode == 0
    broken = run(environment, "-m", "zerolab", "bad0")
    assert broken.returncode == 2
    assert "no driver" in broken.stderr
    assert "Traceback" not in broken.stderr


@pytest.mark.processes
def test_unsupported_routes_are_left_out_of_server(environment: dict[str, str]) -> None:
    script = "from zeroserver.app import ROUTERS\n"
    script += "print(*filter(None, map(ROUTERS.problem, ROUTERS)), sep='\\n')"
    completed = run(environment, "-c", script)
    assert completed.returncode == 0, completed.stderr
    socket, mounted, removed = completed.stdout.splitlines()
    assert "its routes must be HTTP routes, got" in socket
    assert "its routes must be HTTP routes, got" in mounted
    assert "RuntimeError: no driver" in removed
