"""Options of DeepSpeed in ``zerolab launch``, and its installation as ``deepspeed``."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.end_to_end.installation import in_process
from zerolab.cli.main import app

OF_DEEPSPEED = [
    "-H",
    "--hostfile",
    "-i",
    "--include",
    "-e",
    "--exclude",
    "--num_nodes",
    "--min_elastic_nodes",
    "--max_elastic_nodes",
    "--num_gpus",
    "--num_accelerators",
    "--master_port",
    "--master_addr",
    "--node_rank",
    "--launcher",
    "--launcher_args",
    "--module",
    "--no_python",
    "--no_local_rank",
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--enable_each_rank_log",
    "--autotuning",
    "--comment",
    "--account",
    "--elastic_training",
    "--bind_cores_to_rank",
    "--bind_core_list",
    "--ssh_port",
    "--venv_script",
]

SAY = """
import os, pathlib, sys
cores = sorted(os.sched_getaffinity(0))
print((int(os.environ["RANK"]), cores, os.environ["OMP_NUM_THREADS"], sys.argv[1:]))
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``zerolab`` in a folder with a script ``train.py``."""
    (folder / "train.py").write_text(SAY)
    inherited = {name: value for name, value in os.environ.items() if name != "DLTS_HOSTFILE"}
    environment = {**inherited, "ZEROLAB_HOME": str(folder / "home"), **variables}
    command = [sys.executable, "-m", "zerolab", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def refused(folder: Path, *arguments: str, **variables: str) -> str:
    """Run ``zerolab`` as :func:`run`, but in this process; return the message."""
    (folder / "train.py").write_text(SAY)
    environment = {**os.environ, "ZEROLAB_HOME": str(folder / "home"), **variables}
    with contextlib.chdir(folder):
        return in_process(environment, *arguments, expect=2).stderr


def ranks_of(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return sorted(ast.literal_eval(line.split("] ", 1)[1]) for line in done.stdout.splitlines())


def test_every_option_of_deepspeed_is_known() -> None:
    root: Any = typer.main.get_command(app)
    command = root.get_command(root.make_context("zerolab", ["launch"]), "launch")
    options = {name for option in command.params for name in option.opts}
    assert set(OF_DEEPSPEED) - options == set()


def test_options_without_effect_are_accepted(tmp_path: Path) -> None:
    arguments = (
        "--launcher pdsh --no_ssh_check --comment x --enable_each_rank_log None --node_rank -1"
    )
    more = "--min_elastic_nodes -1 --max_elastic_nodes -1 --num_nodes -1 --save_pid --num_gpus 1"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run(
        tmp_path, "launch", *arguments.split(), *more.split(), "train.py", TMPDIR=str(temporary)
    )
    assert [rank for rank, *_ in ranks_of(done)] == [0]
    assert "--comment: without effect" in done.stderr
    assert list(temporary.glob("*.ds")) == []


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--launcher=openmpi", "leave it out"),
        ("--launcher=SLURM", "srun --ntasks-per-node=1 zerolab launch --no_ssh"),
        ("--launcher_args=-f 3", "--ssh-config or --ssh_port"),
        ("--autotuning=fast", "must be run or tune"),
        ("--autotuning=tune", "--deepspeed_config ds_config.json"),
        ("--venv_script=x", "--python"),
        ("--bind_core_list=3-1", "must look like 0,2-5"),
    ],
)
def test_unsupported_option_names_replacement(tmp_path: Path, option: str, remedy: str) -> None:
    message = refused(tmp_path, "launch", option, "--num_gpus", "1", "train.py")
    assert option.partition("=")[0] in message
    assert remedy in message


def test_option_names_take_hyphens_and_underscores(tmp_path: Path) -> None:
    options = ("--num-gpus", "1", "--node_timeout", "9", "--no-local-rank", "train.py", "--a_b-c")
    ((rank, *_, arguments),) = ranks_of(run(tmp_path, "launch", *options))
    assert (rank, arguments) == (0, ["--a_b-c"])


def test_ranks_are_bound_to_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    done = run(tmp_path, "launch", "--num_gpus", "2", "--bind_cores_to_rank", "train.py")
    share = len(cores) // 2
    (_, first, threads, _), (_, second, _, _) = ranks_of(done)
    assert (first, second) == (cores[:share], cores[share : 2 * share])
    assert int(threads) == share
    core = str(cores[1])
    done = run(tmp_path, "launch", "--num_gpus", "1", "--bind_core_list", core, "train.py")
    assert ranks_of(done)[0][1] == [cores[1]]
    done = run(tmp_path, "launch", "--num_gpus", "2", "--bind_core_list", core, "train.py")
    assert done.returncode == 1
    assert "needs at least a core for each of 2 ranks, got 1" in done.stderr


@pytest.mark.parametrize("arguments", [["--localhost:0,5"], ["--include", "localhost:0,5"]])
def test_named_cpu_slots_may_exceed_cores(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, "launch", "--cpu", *arguments, "train.py")
    assert [rank for rank, *_ in ranks_of(done)] == [0, 1]


def test_dlts_hostfile_names_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    hosts = str(tmp_path / "hosts")
    done = run(tmp_path, "launch", "train.py", DLTS_HOSTFILE=hosts)
    assert len(ranks_of(done)) == 3
    done = run(tmp_path, "launch", "--localhost", "0", "train.py", DLTS_HOSTFILE=hosts)
    assert len(ranks_of(done)) == 1
    message = refused(tmp_path, "launch", "train.py", DLTS_HOSTFILE="/nowhere/hosts")
    assert "DLTS_HOSTFILE: must name a file, got /nowhere/hosts" in message


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Interpreter in a separate folder with installed commands."""
    folder = tmp_path / "an environment" / "bin"
    folder.mkdir(parents=True)
    file = folder / "python"
    file.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    file.chmod(0o755)
    return file


def call(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``zerolab`` as if ``python`` had started it."""
    code = (
        f"import sys; sys.executable = {str(python)!r}\n"
        f"sys.argv = ['zerolab', *{arguments!r}]\nfrom zerolab.cli.main import main\nmain()"
    )
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_deepspeed_command_is_installed_and_removed(tmp_path: Path, python: Path) -> None:
    command = python.parent / "deepspeed"
    for _ in range(2):  # a second time is no error
        done = call(python, tmp_path, "deepspeed", "install-command")
        assert (done.returncode, done.stdout.strip()) == (0, str(command)), done.stderr
    (tmp_path / "train.py").write_text("import deepspeed, sys\nprint(sys.argv[1:])\n")
    arguments = [str(command), "--num_gpus", "2", "train.py", "--deepspeed"]
    environment = {**os.environ, "ZEROLAB_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[localhost:1] ['--local_rank=1', '--deepspeed']" in done.stdout
    assert call(python, tmp_path, "deepspeed", "uninstall-command").returncode == 0
    assert not command.exists()
    assert call(python, tmp_path, "deepspeed", "uninstall-command").returncode == 2


def test_real_deepspeed_is_never_replaced(tmp_path: Path, python: Path) -> None:
    command = python.parent / "deepspeed"
    command.write_text("#!/bin/sh\necho real\n")
    command.chmod(0o755)
    for word in ("install-command", "uninstall-command"):
        done = call(python, tmp_path, "deepspeed", word)
        assert done.returncode == 2
        assert str(command) in done.stderr
    assert command.read_text() == "#!/bin/sh\necho real\n"


@pytest.mark.parametrize(
    "arguments", [["train.py"], ["--num_gpus", "2", "train.py"], ["--hostfile"]]
)
def test_zerolab_deepspeed_shows_explanation(tmp_path: Path, arguments: list[str]) -> None:
    message = refused(tmp_path, "deepspeed", *arguments)
    assert "zerolab launch --as-deepspeed train.py" in " ".join(message.split())
