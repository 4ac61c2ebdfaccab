"""Options of the server through ``zerolab up``, and the password of its database."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.disks import mounted
from tests.end_to_end.installation import in_process
from zerolab.files import read_json
from zerolab.paths import Home

PASSWORD = "hush-hush-77"
NOWHERE = f"postgresql://ada:{PASSWORD}@127.0.0.1:1/runs"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    variables = os.environ | {"ZEROLAB_HOME": str(tmp_path / "home")}
    for name in ("ZEROLAB_MASTER", "ZEROLAB_TOKEN", "ZEROLAB_DATABASE"):
        variables.pop(name, None)
    yield variables
    in_process(variables, "down", expect=None)


def zerolab(
    environment: dict[str, str], *arguments: str, expect: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerolab", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    return done


def all_files(directory: Path) -> str:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return " ".join(file.read_bytes().decode(errors="replace") for file in files)


@pytest.mark.parametrize("separate", [True, False])
def test_up_finds_tls_files_of_current_directory(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    separate: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cert.pem", "key.pem"):
        Path(name).write_text("no certificate")
    files = [("--tls-cert", "cert.pem"), ("--tls-key", "key.pem")]
    words = [*files[0], *files[1]] if separate else ["=".join(pair) for pair in files]
    assert "must be a file" not in zerolab(environment, "up", *words, expect=2).stderr


def test_up_on_full_disk_suggests_df(environment: dict[str, str], tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "200k") as disk:
        full = environment | {"ZEROLAB_HOME": str(disk / "home")}
        assert "df -h" in zerolab(full, "up", "--no-agent", "--port", "0", expect=2).stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--log-megabytes", "no"], "argument --log-megabytes: must be a whole number"),
        (["--metric-name", "5"], "unknown option --metric-name; did you mean --metric-names?"),
        (["nonsense"], "unknown argument nonsense; --help lists"),
        (["--host", "0.0.0.0"], "--host: must be a loopback address"),
        (["--home", "/elsewhere"], "--home: must be left out; set ZEROLAB_HOME"),
        (["--database"], "--database: must have a URL, got nothing"),
        (["--database="], "--database: must have a URL, got nothing"),
        (["--database", "--metric-names"], "--database: must have a URL, got --metric-names"),
        (["--database", f"mysql://ada:{PASSWORD}@x/y"], "must be postgresql://USER@HOST/NAME"),
        ([f"--database=postgresql:/{PASSWORD}"], "must be postgresql://USER@HOST/NAME"),
    ],
)
def test_up_rejects_invalid_server_options(
    environment: dict[str, str], command: list[str], message: str
) -> None:
    refused = in_process(environment, "up", "--no-agent", "--port", "0", *command, expect=2)
    assert message in refused.stderr
    assert PASSWORD not in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not Home(Path(environment["ZEROLAB_HOME"])).server_file.exists()


def test_up_passes_server_options(environment: dict[str, str]) -> None:
    options = ["--log-megabytes", "16", "--metric-names", "7", "--no-custom-searchers"]
    zerolab(environment, "up", "--no-agent", "--port", "0", *options)
    home = Home(Path(environment["ZEROLAB_HOME"]))
    server = psutil.Process((read_json(home.server_file) or {})["pid"])
    assert server.cmdline()[-len(options) :] == options
    again = zerolab(environment, "up", "--no-agent", "--metric-names", "8")
    assert "the server is running with other options" in again.stderr


@pytest.mark.parametrize("by", ["variable", "option", "query"])
def test_password_of_database_is_never_shown(environment: dict[str, str], by: str) -> None:
    command: list[str] = ["--database", NOWHERE] if by == "option" else []
    if by == "variable":
        environment["ZEROLAB_DATABASE"] = NOWHERE
    elif by == "query":
        environment["ZEROLAB_DATABASE"] = f"postgresql://ada@127.0.0.1:1/runs?password={PASSWORD}"
    failed = zerolab(environment, "up", "--no-agent", "--port", "0", *command, expect=2)
    assert "cannot be opened" in failed.stderr
    checked = zerolab(environment, "db", "check", *command, expect=2)
    shown = failed.stdout + failed.stderr + checked.stdout + checked.stderr
    assert PASSWORD not in shown + all_files(Path(environment["ZEROLAB_HOME"]))


def test_agent_hides_address_of_database(environment: dict[str, str]) -> None:
    script = (
        "import pathlib\n"
        "from zerolab.agent.token import hide_environment_token\n"
        "print(repr(hide_environment_token()))\n"
        "print(pathlib.Path('/proc/self/environ').read_text())\n"
    )
    for token in ("", "secret-of-an-agent"):
        environment |= {"ZEROLAB_DATABASE": NOWHERE, "ZEROLAB_TOKEN": token}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert done.stdout.startswith(repr(token))
        assert PASSWORD not in done.stdout
