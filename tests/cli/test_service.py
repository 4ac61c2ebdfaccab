"""Units of systemd, and the commands of the container files."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from zerolab.cli.agent import group as agent_group
from zerolab.contract.spec import ENV_TOKEN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    names = {"ZEROLAB_HOME": "ho me%x", "XDG_CONFIG_HOME": "config", "XDG_RUNTIME_DIR": "runtime"}
    variables = os.environ | {name: str(tmp_path / path) for name, path in names.items()}
    for name in ("ZEROLAB_MASTER", "ZEROLAB_TOKEN", "ZEROLAB_DATABASE"):
        variables.pop(name, None)
    (tmp_path / "runtime").mkdir()
    return variables


def install(environment: dict[str, str], *arguments: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "zerolab", "service", "install", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=environment["XDG_RUNTIME_DIR"], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return done.stderr if expect else done.stdout


def command_of(unit: str) -> list[str]:
    (line,) = re.findall("^ExecStart=(.+)$", unit, re.MULTILINE)
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def test_server_unit_starts_the_server(environment: dict[str, str]) -> None:
    options = ["--port", "8081", "--host-name", "a.example.org"]
    file = Path(install(environment, "server", *options).strip())
    assert file == Path(environment["XDG_CONFIG_HOME"], "systemd/user/zerolab-server.service")
    unit = file.read_text(encoding="utf-8")
    assert unit == install(environment, "server", *options, "--print")
    home = environment["ZEROLAB_HOME"].replace("%", "%%")
    assert f'Environment="ZEROLAB_HOME={home}"\n' in unit
    command = command_of(unit)
    assert command[-4:] == options
    subprocess.run([*command, "--check-options"], env=environment, check=True)
    if shutil.which("systemd-analyze"):
        verify = ["systemd-analyze", "--user", "verify", str(file)]
        done = subprocess.run(verify, env=environment, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr


def test_agent_unit_has_absolute_paths(environment: dict[str, str]) -> None:
    options = ["--slots", "2", "--token-file", "a $ b"]
    command = command_of(install(environment, "agent", *options, "--print"))
    token_file = str(Path(environment["XDG_RUNTIME_DIR"], "a $ b"))
    assert command[-6:] == ["agent", "start", "--slots", "2", "--token-file", token_file]
    assert not Path(environment["XDG_CONFIG_HOME"]).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["server", "--prt", "1"], "unknown option --prt; did you mean --port?"),
        (["server", "--database", "postgresql://a:hush@b/c"], "must not be in a unit"),
        (["agent", "--slot", "1"], "No such option: --slot"),
        (["agent", "--token-file", "-"], "must be a file, got standard input"),
        (["agent", "--name", "a\nb"], "must have no control characters"),
    ],
)
def test_invalid_options_are_refused(
    environment: dict[str, str], arguments: list[str], message: str
) -> None:
    error = install(environment, *arguments, expect=2)
    assert message in error
    assert "hush" not in error
    assert not Path(environment["XDG_CONFIG_HOME"]).exists()


def check_command(command: list[str]) -> None:
    """Let the program check its options; nothing starts."""
    if command[:3] == ["python", "-m", "zeroserver"]:
        subprocess.run([sys.executable, *command[1:], "--check-options"], check=True)
        return
    assert command[:3] == ["zerolab", "agent", "start"]
    start = get_command(agent_group).commands["start"]  # type: ignore[attr-defined]
    start.make_context("start", command[3:])


def test_commands_of_container_files_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    check_command(json.loads(re.findall("^CMD (.+)$", dockerfile, re.MULTILINE)[0]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = re.findall(r"/src\[(\w+)\]", dockerfile)
    assert extra in project["optional-dependencies"]
    (version,) = re.findall(r"python:([\d.]+)-slim", dockerfile)
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    (home,) = re.findall("^ENV ZEROLAB_HOME=(.+)$", dockerfile, re.MULTILINE)
    for service in compose["services"].values():
        check_command(shlex.split(service["command"]))
        mounts = dict(volume.split(":") for volume in service["volumes"])
        assert mounts.keys() <= compose["volumes"].keys()
        assert set(mounts.values()) == {home, f"{home}/checkpoints"}
    published = compose["services"]["server"]["ports"]
    assert published == ["127.0.0.1:8080:8080"]  # the server has no certificate
    health = shlex.split(compose["services"]["server"]["healthcheck"]["test"])
    assert health[:2] == ["python", "-c"]
    compile(health[2], "healthcheck", "exec")
    agent = compose["services"]["agent"]
    assert agent["environment"].keys() <= {ENV_TOKEN}
    assert agent["depends_on"].keys() <= compose["services"].keys()


def test_image_contains_the_sources_of_the_wheel_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"  # a file such as .env stays out
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert {name for name in kept if not (ROOT / name).exists()} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    build = ast.parse((ROOT / "hatch_build.py").read_text(encoding="utf-8"))
    (of_docs,) = (
        ast.literal_eval(node.value)
        for node in build.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DOCS_SOURCES"
    )
    sources = {
        "pyproject.toml", "README.md", "hatch_build.py", "server/web",
        *project["project"]["license-files"], *wheel["packages"], *wheel["force-include"],
        *of_docs,
    }  # fmt: skip
    assert {Path(source).parts[0] for source in sources} == kept
