"""Another Python interpreter for a run: check and use."""

import sysconfig
import venv
from pathlib import Path

import msgspec
import pytest

from tests.launcher.helpers import end_of, make_run
from zerolab.contract.messages import SlotInfo
from zerolab.contract.outcome import Outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import read_run_spec, write_run_spec
from zerolab.launcher.interpreter import interpreter_problem
from zerolab.launcher.local import LocalLauncher
from zerolab.launcher.process import start_launcher
from zerolab.paths import Home

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty virtual environment."""
    path = tmp_path_factory.mktemp("environments") / "empty"
    venv.create(path, symlinks=True)
    return path


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the packages of this one."""
    path = tmp_path_factory.mktemp("environments") / "complete"
    venv.create(path, symlinks=True)
    (site,) = path.glob("lib/python*/site-packages")
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (site / "ours.pth").write_text(line + "\n")
    return path


def test_unusable_interpreter_has_remedy(empty: Path, complete: Path, tmp_path: Path) -> None:
    problem = interpreter_problem(str(tmp_path / "nowhere")) or ""
    assert problem.startswith("environment.python: must be an interpreter")
    assert f"{tmp_path / 'nowhere'} is not there" in problem
    (tmp_path / "plain").write_text("")
    assert f"`chmod +x {tmp_path / 'plain'}`" in (
        interpreter_problem(str(tmp_path / "plain")) or ""
    )
    missing = interpreter_problem(str(empty)) or ""
    assert f"{empty / 'bin' / 'python'} cannot import zerotrial: ModuleNotFound" in missing
    assert "-m pip install zerolab==" in missing
    assert interpreter_problem(str(complete)) is None
    assert interpreter_problem(str(complete / "bin" / "python")) is None


@pytest.mark.parametrize("entrypoint", ["python script.py", "script:Trial"])
def test_run_uses_its_interpreter(complete: Path, tmp_path: Path, entrypoint: str) -> None:
    script = "import sys; print(sys.prefix); sys.exit(0)"
    environment = {"python": str(complete)}
    folder = make_run(tmp_path / "run", script, 1, entrypoint, environment=environment)
    launcher = LocalLauncher(Home(tmp_path / "home").create(), [SlotInfo(0, "cpu")])
    launcher.keep_ready()
    try:
        process = launcher.start(folder, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        assert end_of(process, folder) == Outcome(0)
    finally:
        launcher.close()
    assert folder.stdout(0).read_text() == f"{complete}\n"


def test_rank_with_several_slots(tmp_path: Path) -> None:
    names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE"
    script = f"import os; print(*(os.environ[name] for name in {names}))"
    folder: RunFolder = make_run(tmp_path / "run", script, slots=2)
    spec = msgspec.structs.replace(read_run_spec(folder.spec), slots_per_rank=2)
    write_run_spec(spec, folder.spec)
    process = start_launcher(
        folder, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    )  # fmt: skip
    assert end_of(process, folder) == Outcome(0)
    assert [folder.stdout(rank).read_text() for rank in (0, 1)] == ["4,5 2 2\n", "6,7 2 2\n"]
